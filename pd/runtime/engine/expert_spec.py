"""Reads which experts a model has and how a token is given to them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pd.runtime.engine.fields import Fields


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """A mixture of experts in place of an MLP: a score for each of them, and the best few for each token.

    Scores are a softmax over all experts, or the sigmoid of each. The weight of an expert is its score.
    """

    num_experts: int
    num_chosen: int  # a token
    intermediate_size: int  # of each
    is_renormalised: bool  # the weights of those chosen are made to sum to 1
    layers: tuple[bool, ...]  # which have one; the others have an MLP
    is_sigmoid: bool = False
    has_bias: bool = False  # on scores when experts are chosen, not on weights
    factor: float = 1.0  # of weights
    num_groups: int = 1  # of experts: only the best few groups may give any
    num_groups_chosen: int = 1
    shared_size: int = 0  # columns of an MLP that every token goes through beside
    is_router_wide: bool = False  # computes in float32 whatever the model's dtype
    at: str = "mlp."  # its name in a layer of the checkpoint
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # their names in an expert

    def check(self) -> list[str]:
        """Faults in words."""
        faults = []
        if self.num_chosen > self.num_experts:
            faults.append(f"num_experts_per_tok {self.num_chosen} is more than the {self.num_experts} experts")
        if self.num_experts % self.num_groups or self.num_groups_chosen > self.num_groups:
            faults.append(
                f"{self.num_experts} experts in n_group {self.num_groups}, of which topk_group "
                f"{self.num_groups_chosen}: groups must be whole, and not more chosen than there are"
            )
        elif self.num_chosen > self.num_experts // self.num_groups * self.num_groups_chosen:
            faults.append(f"{self.num_groups_chosen} groups do not have num_experts_per_tok {self.num_chosen} experts")
        if self.is_sigmoid and self.num_experts // self.num_groups < 2:
            faults.append("a group is judged by its two best experts, so it must have two")
        return faults


def qwen3_experts(fields: Fields, num_layers: int) -> ExpertSpec:
    """As Qwen3-MoE tells of them; newer transformers say num_local_experts."""
    said = "num_local_experts" if "num_local_experts" in fields.config else "num_experts"
    step = fields.size("decoder_sparse_step", 1)
    plain = fields.config.get("mlp_only_layers") or ()
    without = set(plain) if isinstance(plain, list | tuple) else set()
    return ExpertSpec(
        num_experts=fields.size(said, 128),
        num_chosen=fields.size("num_experts_per_tok", 8),
        intermediate_size=fields.size("moe_intermediate_size", 768),
        is_renormalised=fields.flag("norm_topk_prob"),
        layers=tuple(layer not in without and (layer + 1) % step == 0 for layer in range(num_layers)),
    )


def mixtral_experts(fields: Fields, num_layers: int) -> ExpertSpec:
    return ExpertSpec(
        num_experts=fields.size("num_local_experts", 8),
        num_chosen=fields.size("num_experts_per_tok", 2),
        intermediate_size=fields.size("intermediate_size"),
        is_renormalised=True,
        layers=(True,) * num_layers,
        at="block_sparse_moe.",
        gate_up_down=("w1", "w3", "w2"),
    )


def deepseek_v2_experts(fields: Fields, num_layers: int) -> ExpertSpec:
    fields.refuse("scoring_func", "softmax")
    fields.refuse("topk_method", "greedy", "group_limited_greedy")
    fields.refuse("norm_topk_prob", False, None)  # transformers does without it, the first code did not
    is_grouped = fields.config.get("topk_method") == "group_limited_greedy"
    size = fields.size("moe_intermediate_size", 1407)
    return ExpertSpec(
        num_experts=fields.size("n_routed_experts", 64),
        num_chosen=fields.size("num_experts_per_tok"),
        intermediate_size=size,
        is_renormalised=False,
        layers=_behind_dense(fields, num_layers, 0),
        factor=fields.number("routed_scaling_factor", 1.0),
        num_groups=fields.size("n_group") if is_grouped else 1,
        num_groups_chosen=fields.size("topk_group") if is_grouped else 1,
        shared_size=size * fields.count("n_shared_experts", 2),
        is_router_wide=True,
    )


def deepseek_v3_experts(fields: Fields, num_layers: int) -> ExpertSpec:
    fields.refuse("scoring_func", "sigmoid")
    fields.refuse("topk_method", "noaux_tc")
    size = fields.size("moe_intermediate_size", 2048)
    return ExpertSpec(
        num_experts=fields.size("n_routed_experts", 256),
        num_chosen=fields.size("num_experts_per_tok", 8),
        intermediate_size=size,
        is_renormalised=fields.flag("norm_topk_prob", default=True),
        layers=_behind_dense(fields, num_layers, 3),
        is_sigmoid=True,
        has_bias=True,
        factor=fields.number("routed_scaling_factor", 2.5),
        num_groups=fields.size("n_group", 8),
        num_groups_chosen=fields.size("topk_group", 4),
        shared_size=size * fields.count("n_shared_experts", 1),
        is_router_wide=True,
    )


def _behind_dense(fields: Fields, num_layers: int, default: int) -> tuple[bool, ...]:
    """All layers but the first few."""
    fields.refuse("moe_layer_freq", 1)
    num_dense = fields.count("first_k_dense_replace", default)
    return tuple(layer >= num_dense for layer in range(num_layers))
