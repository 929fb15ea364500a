"""The Serve example put together without Serve: what its config file says, and what build() makes of it."""

import base64
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

pytest.importorskip("transformers")
schema = pytest.importorskip("ray.serve.schema")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        from qwen3_omni import audio
        from serve_pipeline import app, settings

        yield SimpleNamespace(app=app, audio=audio, PipelineSettings=settings.PipelineSettings)


def read_config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((EXAMPLES / "serve_pipeline" / "serve_config.yaml").read_text())
    return config


def deployments(application: Any) -> dict[str, Any]:
    """By name."""
    chat = application._bound_deployment
    stages = [argument._bound_deployment for argument in chat.init_args[1:]]
    return {deployment.name: deployment for deployment in (chat, *stages)}


def test_the_config_file_changes_numbers_of_deployments_that_there_are(example: SimpleNamespace) -> None:
    config = read_config()
    schema.ServeDeploySchema.model_validate(config)
    (application,) = config["applications"]
    built = deployments(example.app.build(example.PipelineSettings(**application["args"])))
    changed = {deployment.pop("name"): deployment for deployment in application["deployments"]}
    assert changed.keys() == built.keys()
    for deployment in changed.values():
        assert deployment.keys() <= {"num_replicas", "autoscaling_config"}


def test_one_node_of_two_cpus_has_room_for_all_that_the_config_file_wants(example: SimpleNamespace) -> None:
    (application,) = read_config()["applications"]
    built = deployments(example.app.build(example.PipelineSettings(**application["args"])))
    needed = 0.0
    for deployment in application["deployments"]:
        one = built[deployment["name"]]
        most = deployment.get("autoscaling_config", {}).get("max_replicas") or deployment["num_replicas"]
        needed += most * one.ray_actor_options["num_cpus"]
        assert not one._replica_config.max_replicas_per_node
    assert needed <= 2


@pytest.mark.parametrize(
    "given", [{}, {"small": False}, {"dtype": "float32", "service": "other"}, {"router": {"timeout_s": 1.0}}]
)
def test_the_router_looks_where_the_thinkers_keep_rows(example: SimpleNamespace, given: dict[str, Any]) -> None:
    settings = example.PipelineSettings(**given)
    config = deployments(example.app.build(settings))["Thinker"]._deployment_config.request_router_config
    kwargs = config.request_router_kwargs
    assert {name: kwargs[name] for name in settings.key_space} == settings.key_space
    assert kwargs.items() >= settings.router.items()
    assert settings.key_space == {"service": settings.service, "model": settings.model}


def test_as_many_codes_can_be_asked_for_as_can_be_given(example: SimpleNamespace) -> None:
    messages = [{"role": "user", "content": "x"}]
    for count in (0, 1, 1024):
        assert example.app.ChatRequest(messages=messages, max_codes=count).max_codes == count
    with pytest.raises(ValidationError):
        example.app.ChatRequest(messages=messages, max_codes=1025)


def test_a_wav_file_comes_back_as_it_was(example: SimpleNamespace) -> None:
    samples = np.random.default_rng(0).integers(-30000, 30000, size=1601).astype(np.int16)
    np.testing.assert_array_equal(example.audio.from_wav(example.audio.to_wav(samples)), samples)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "no WAV file"),
        (b"RIFF0000WAVE", "no WAV file"),
        (None, "expected a WAV of 16 bit, mono, 16 kHz, of 0.1 s or longer"),
    ],
)
def test_what_is_no_clip_is_refused(example: SimpleNamespace, content: bytes | None, complaint: str) -> None:
    if content is None:
        content = example.audio.to_wav(np.zeros(100, np.int16))
    with pytest.raises(ValueError, match=complaint):
        example.audio.from_wav(content)
    part = {"type": "audio", "wav": base64.b64encode(content).decode()}
    message = example.app.Message(role="user", content=[part])
    with pytest.raises(example.app.HTTPException, match=complaint):
        example.app.make_prompt("", [message])
