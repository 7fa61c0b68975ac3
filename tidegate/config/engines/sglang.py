"""SGLang: a server for each engine, in an environment of its own."""

from __future__ import annotations

from typing import Literal

from tidegate.config.base import ConfigPath, PositiveFloat, Section
from tidegate.config.engines.kind import Environment
from tidegate.huggingface.sglang_support import OptionValue, check_options, check_servable, check_version
from tidegate.model_config import ModelConfig


class SglangSection(Section):
    """A real SGLang server for each engine, in an environment of its own."""

    python: ConfigPath = ""
    """The interpreter of that environment, relative to the config's folder. `engine: sglang` needs it."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    start_timeout_s: PositiveFloat = 110.0
    """The time limit of a server's start. A command waits for it, so it is below `runtime.command_deadline_s`."""
    options: dict[str, OptionValue] = {}  # noqa: RUF012 # pydantic copies it for each section
    """Further options of the server, by SGLang's names, such as `attention-backend: triton`."""

    def faults(self, *, max_running_requests: int, command_deadline_s: float) -> list[str]:
        faults = []
        if not self.python:
            faults.append(
                "rollout.engine=sglang needs rollout.sglang.python, the interpreter of an environment with SGLang, "
                "such as .venv-sglang/bin/python (`make .venv-sglang` makes it)"
            )
        if self.start_timeout_s >= command_deadline_s:
            faults.append(
                f"rollout.sglang.start_timeout_s={self.start_timeout_s:g} is not below "
                f"runtime.command_deadline_s={command_deadline_s:g}, the deadline of the command that starts the "
                "server: lower the first or raise the second"
            )
        try:
            check_options(self.options)
        except ValueError as error:
            faults.append(f"rollout.sglang.options: {error}")
        return faults

    def warnings(self, *, device: str) -> list[str]:
        if device != "cpu":
            return []
        return [
            "rollout.engine=sglang samples without seeds on a CPU: another run of this job has other responses; set it "
            "to embedded for reproducible runs"
        ]

    def check_model(self, model: ModelConfig) -> None:
        check_servable(model)

    def environment(self) -> Environment | None:
        return Environment(
            python=self.python,
            key="rollout.sglang.python",
            package="sglang",
            check_version=check_version,
            remedy="name the interpreter of an environment with SGLang (`make .venv-sglang` makes one)",
        )
