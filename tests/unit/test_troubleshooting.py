"""docs/troubleshooting.md lists the messages that the tests provoke, those and no others."""

import re
from pathlib import Path

from tests.messages import MESSAGES, said

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def test_the_page_lists_the_messages_in_their_order() -> None:
    assert re.findall(r"^\| `(.+?)` \|", PAGE, flags=re.MULTILINE) == list(MESSAGES.values())


def test_every_message_is_provoked_by_a_test() -> None:
    files = ("tests/cluster/test_errors.py", "tests/unit/test_installation.py")
    tests = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    assert {name for name in MESSAGES if f'said("{name}"' not in tests} == set()


def test_a_message_is_found_on_one_line_only() -> None:
    assert said("no cluster", "Error: no Ray cluster can be joined at x:1: refused")
    assert not said("no cluster", "no Ray cluster can be joined at\nx: refused")
