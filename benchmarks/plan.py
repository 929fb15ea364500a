"""How much is measured: all of it, or the quick form that shows that everything works."""

from dataclasses import dataclass

from benchmarks.subject import Size


@dataclass(frozen=True)
class Plan:
    """Sizes and rounds.

    Attributes:
        full_size: at which stores into a full pool are measured.
        full_prompts: how many prompts of it fill the pool.
        clients: numbers of client processes.
        patience_s: how long to wait for a quiet machine, each time.
        commands: benchmarks in processes of their own: module → arguments.
    """

    sizes: tuple[Size, ...]
    rounds: int
    full_size: Size
    full_prompts: int
    clients: tuple[int, ...]
    clients_size: Size
    clients_seconds: float
    clients_rounds: int
    patience_s: float
    commands: dict[str, tuple[str, ...]]


_TOKENS, _HIDDEN = (1024, 8192, 32768), (2048, 3584)

FULL = Plan(
    sizes=tuple(Size(tokens, hidden, layers) for hidden in _HIDDEN for layers in (1, 3) for tokens in _TOKENS),
    rounds=10,
    full_size=Size(8192, 2048),
    full_prompts=8,
    clients=(1, 2, 4, 8),
    clients_size=Size(8192, 2048),
    clients_seconds=2.0,
    clients_rounds=3,
    patience_s=15.0,
    commands={"cross_node": (), "steps": (), "replay": (), "churn": ()},
)
QUICK = Plan(
    sizes=(Size(1024, 2048), Size(8192, 2048), Size(1024, 2048, 3)),
    rounds=3,
    full_size=Size(1024, 2048),
    full_prompts=4,
    clients=(1, 2),
    clients_size=Size(1024, 2048),
    clients_seconds=0.5,
    clients_rounds=1,
    patience_s=1.0,
    commands={"cross_node": ("--rounds", "3", "--tokens", "1024", "--kills", "0")},
)
