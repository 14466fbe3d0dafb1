"""nixl: which wheel, which plugins, and whether an agent with UCX comes up."""

from __future__ import annotations

from importlib import metadata

from pd.doctor.answers import Nixl
from pd.doctor.measure.nixl_api import nixl_agent, nixl_agent_config


def answer() -> Nixl:
    wheels = {d.metadata["Name"].lower().replace("_", "-") for d in metadata.distributions()}
    cuda = next((n[7:] for n in sorted(wheels) if n.startswith("nixl-cu") and n[7:].isdigit()), "")
    bare = nixl_agent("pd-doctor", nixl_agent_config(enable_prog_thread=False, backends=[]))
    plugins = tuple(sorted(bare.get_plugin_list()))
    types, error = _start()
    return Nixl(version=metadata.version("nixl"), cuda=cuda, plugins=plugins, backend_error=error, memory_types=types)


def _start() -> tuple[tuple[str, ...], str]:
    try:
        agent = nixl_agent("pd-doctor-ucx", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        return tuple(t.removesuffix("_SEG") for t in agent.get_backend_mem_types("UCX")), ""
    except Exception as error:  # noqa: BLE001  nixl's bindings raise their own kinds, all of them an answer here
        return (), f"{type(error).__name__}: {error}"
