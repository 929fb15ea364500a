"""Which nodes carry a service. Needs no torch."""

from typing import Any

from hs_cache.config import CacheConfig, NodeRequirements


def resolve_selector(config: CacheConfig, nodes: list[dict[str, Any]]) -> CacheConfig:
    """`config` with ``node_selector: auto`` decided for good: nodes with GPUs if there is one now, else all nodes.

    Decided once, at the start: a service that ran on all nodes would not shrink because a GPU node joins. Where GPU
        nodes are still to come, the configuration has to say ``gpu``.
    """
    if config.node_selector != "auto":
        return config
    decided = "gpu" if any(_gpus(node) for node in nodes if node["Alive"]) else "all"
    return CacheConfig(**{**config.model_dump(exclude_unset=True), "node_selector": decided})


def select_nodes(config: CacheConfig, nodes: list[dict[str, Any]]) -> list[str]:
    """Hex ids of the nodes alive (as ``ray.nodes()`` lists them) that match ``node_selector``, sorted."""
    selector = resolve_selector(config, nodes).node_selector
    alive = [node for node in nodes if node["Alive"]]
    if isinstance(selector, NodeRequirements):
        chosen = [node for node in alive if _meets(selector, node)]
    else:
        chosen = [node for node in alive if selector == "all" or _gpus(node)]
    return sorted(node["NodeID"] for node in chosen)


def _gpus(node: dict[str, Any]) -> float:
    return float(node["Resources"].get("GPU", 0))


def _meets(required: NodeRequirements, node: dict[str, Any]) -> bool:
    labels, resources = node.get("Labels", {}), node["Resources"]
    return all(labels.get(name) == value for name, value in required.labels.items()) and all(
        resources.get(name, 0) >= amount for name, amount in required.resources.items()
    )
