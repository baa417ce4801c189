"""`ray`: which Ray cluster the run uses."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from raytrainer.config.section import OptionalText, Section


class RaySection(Section):
    """Which Ray cluster the run uses."""

    address: OptionalText = Field(
        None,
        description="Address of a running cluster; null: RAY_ADDRESS, else a Ray started on this machine.",
        examples=["auto"],
    )
    runtime_env: dict[str, Any] = Field(
        {},
        description="Ray runtime environment of the workers.",
        examples=[{"env_vars": {"NCCL_DEBUG": "WARN"}}],
    )
    init: dict[str, Any] = Field(
        {}, description="Further keywords for `ray.init`.", examples=[{"num_cpus": 4}]
    )
    wait: bool = Field(
        False,
        description="Wait for nodes to join while the cluster is too small, instead of failing at once.",
    )
