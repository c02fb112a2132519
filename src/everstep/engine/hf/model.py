"""`everstep.hf`: a causal LM of transformers as a `Model`, its parameters under their original names."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everstep.engine.hf import weights
from everstep.engine.hf.anatomy import (
    Anatomy,
    anatomy_of,
    crossing_layer,
    with_stand_ins,
)
from everstep.engine.hf.source import config_of, folder_of, plain_config, transformers
from everstep.engine.hf.stage_forward import StageModel, taken_by
from everstep.engine.layers.boundary import Value, described
from everstep.engine.layers.model import Model, ModelAssembly, Through, in_short, token_loss
from everstep.engine.layers.shard_plan import STYLES, from_theirs
from everstep.engine.layers.taken_over import QueuedEmbedding, queued_forward
from everstep.errors import UserError

Prepare = Callable[[Any], Any]  # changes the model in place: freezes, puts adapters in


def hf(
    source: Any,
    *,
    weights: bool | None = None,
    train: str | Sequence[str] = (),
    freeze: str | Sequence[str] = (),
    prepare: Prepare | None = None,
    **changes: Any,
) -> Model:
    """A causal language model of Hugging Face transformers, for `everstep.train(model=...)`.

    source      a folder with config.json and safetensors, a config.json, or a config object
    weights     start from the folder's weights; False: from values drawn by the seed. By default, what the
                folder has
    train       names of the parameters to train, with * for any text, such as "*.self_attn.*"; the others
                are frozen
    freeze      names of the parameters not to train
    prepare     a function of the model that changes it in place before it is cut: freezes parameters, puts
                in adapters (peft's `inject_adapter_in_model`)
    changes     values of the config to change: num_hidden_layers=4, attn_implementation="eager"

    A batch is a dict with input_ids and labels (as in transformers: not shifted, -100 is not counted), maybe
    attention_mask and position_ids; or (tokens, targets) with targets shifted already.
    """
    config = config_of(source, changes)
    folder = folder_of(source) if isinstance(source, str | Path) else None
    if weights and folder is None:
        raise UserError("weights=True needs a folder with safetensors; hf was given a config.")
    family = Family(config, folder if weights is not False else None, prepare, _list(train), _list(freeze))
    if weights and family.folder is None:
        raise UserError(f"model folder {str(folder)!r} has no safetensors; save it with save_pretrained.")
    return family.model()


class Family:
    """What the workers of a model share: its config, its form, and where its values come from."""

    def __init__(
        self,
        config: Any,
        folder: Path | None,
        prepare: Prepare | None = None,
        train: Sequence[str] = (),
        freeze: Sequence[str] = (),
    ) -> None:
        self.config, self.prepare, self.train, self.freeze = config, prepare, train, freeze
        self.bare = self._bare()
        self.folder = None
        if folder is not None:
            found = weights.Folder(folder, self.bare)
            self.folder = found if found.is_there else None
        self.whole = self._prepared(copy.deepcopy(self.bare)) if prepare is not None else self.bare
        self._set_trained(self.whole)

    def model(self) -> Model:
        anatomy = self.anatomy
        edges = tuple(group for group in (anatomy.before, anatomy.after) if len(group) > 1)
        return Model(
            layers={name: partial(self.layer, name) for name in anatomy.names},
            loss=CausalLoss(getattr(self.config, "router_aux_loss_coef", 0.0)),
            tied=tuple((first, second) for second, first in sorted(self._tied().items())),
            assembly=ModelAssembly(
                join=self.join,
                together=edges,
                costs={name: self._cost(name) for name in anatomy.names},
                recomputed=frozenset(anatomy.layers),
                check=self.check,
                card=self._card(),
                shared_out=self._heads(),
                in_fp32=tuple(sorted(getattr(self.bare, "_keep_in_fp32_modules_strict", None) or ())),
            ),
            shard_plan=self._shard_plan(),
        )

    def empty(self) -> Any:
        """A copy of the whole model without values."""
        return copy.deepcopy(self.whole)

    def _card(self) -> dict[str, Any]:
        started = {} if self.folder is None else {"hf_folder": str(self.folder.path.resolve())}
        return {"hf_config": plain_config(self.config), **started}

    # -------------------------------------------------------------- for the stages

    def layer(self, name: str) -> nn.Module:
        """The module of this name: on the meta device its shapes, else its values."""
        there: nn.Module = self.whole.get_submodule(name)
        if torch.empty(0).is_meta:
            return copy.deepcopy(there)
        holder = self._alone(self.bare, name)
        if self.folder is not None:
            module = self.folder.load(holder, name)
        else:
            module = weights.drawn(holder, name)
        _share(module, self.bare.get_submodule(name))
        trained = {key: p.requires_grad for key, p in there.named_parameters()}
        if self.prepare is not None and trained.keys() != {key for key, _ in module.named_parameters()}:
            self._prepared(holder)
            module = holder.get_submodule(name)
        for key, parameter in module.named_parameters():
            parameter.requires_grad_(trained[key])
        for part, like in zip(module.modules(), there.modules(), strict=True):
            part.training = like.training  # what `prepare` has put into eval()
        return module

    def join(self, layers: range, modules: list[nn.Module], device: torch.device) -> Through:
        # Tables of the frame are made in the precision of the computation where the model makes them so.
        every = [p for module in modules for p in module.parameters() if p.is_floating_point()]
        dtype = max(every, key=lambda p: p.numel()).dtype
        whole = self.whole if dtype == torch.float32 else self._bare(dtype)
        return StageModel(whole, self.anatomy, layers, modules, device)

    def check(self, inputs: Value, targets: Value) -> None:
        """The first batch: are its keys and tokens those of a language model?"""
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.ndim != 2:
            raise UserError(
                f"data gives {described(inputs)}; a language model takes a dict with input_ids, whole "
                "numbers in rows x length, or (tokens, targets)."
            )
        kind = type(self.whole)
        unknown = (
            set(inputs) - taken_by(kind) - {"input_ids", "labels"} if isinstance(inputs, Mapping) else set()
        )
        if unknown:
            raise UserError(
                f"data gives {min(unknown)!r}, which {kind.__name__} does not take and which would change "
                "nothing; leave it out of the batch."
            )
        if isinstance(inputs, Mapping) and _holds_documents(inputs):
            self._refuse_crossing()
        if self.folder is not None:
            self.folder.check()
        else:
            self._refuse_unset()
        text = self.config.get_text_config()
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < text.vocab_size:
            raise UserError(
                f"data gives tokens {int(tokens.min())} to {int(tokens.max())} and the model knows 0 to "
                f"{text.vocab_size - 1}; was another tokenizer used?"
            )
        most = getattr(text, "max_position_embeddings", None)
        if most is not None and tokens.shape[1] > most:
            raise UserError(f"data gives rows of {tokens.shape[1]} tokens, and the model takes {most}.")

    def _refuse_unset(self) -> None:
        """What is set when a model is built, and not when it is initialised, a layer alone would not have."""
        model = copy.deepcopy(self.bare)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        versions = {name: tensor._version for name, tensor in tensors.items() if tensor.is_meta}
        model.initialize_weights()
        unset = next((name for name, version in versions.items() if tensors[name]._version == version), None)
        if unset is not None:
            raise UserError(
                f"{unset} is set when {type(model).__name__} is built and not when it is initialised, so it "
                "cannot be drawn by the seed; save the model (save_pretrained) and start from its folder."
            )

    def _refuse_crossing(self) -> None:
        """Kernels of flash attention find the documents in position_ids by themselves."""
        if self.whole.config._attn_implementation not in ("sdpa", "eager"):
            return
        layer = crossing_layer(self.whole, self.anatomy)
        if layer is not None:
            raise UserError(
                f"data gives rows of several documents (position_ids begin again), and in {layer} of "
                f"{type(self.whole).__name__} a document would see the one before it; give rows of one "
                "document each."
            )

    # -------------------------------------------------------------- how

    @cached_property
    def anatomy(self) -> Anatomy:
        return anatomy_of(self.whole)

    def _bare(self, dtype: torch.dtype = torch.float32) -> Any:
        auto = transformers().AutoModelForCausalLM
        dropped = [key for key in ("layerdrop", "layer_drop") if getattr(self.config, key, 0)]
        if dropped:
            raise UserError(f"{dropped[0]} is above 0, and layers that are left out at random cannot be cut.")
        try:
            with torch.device("meta"):
                model = auto.from_config(self.config, dtype=dtype)
        except (ValueError, KeyError) as error:
            raise UserError(
                f"{type(self.config).__name__} is not a causal language model: {in_short(error)}."
            ) from None
        except Exception as error:  # transformers', about a config that lacks something
            kind = type(self.config).__name__
            raise UserError(
                f"transformers cannot build a model from this {kind}: {in_short(error)}."
            ) from None
        return model

    def _prepared(self, model: Any) -> Any:
        assert self.prepare is not None
        try:
            self.prepare(model)
        except Exception as error:  # the user's function
            raise UserError(f"prepare raised {in_short(error)}.") from error
        return model

    def _set_trained(self, model: Any) -> None:
        if self.train and self.freeze:
            raise UserError("train and freeze are both given; give one.")
        for patterns, kept in ((self.train, True), (self.freeze, False)):
            names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise UserError(
                        f"{'train' if kept else 'freeze'} names {pattern!r}, which fits no parameter such as "
                        f"{names[len(names) // 2]!r}."
                    )
            for name, parameter in model.named_parameters() if patterns else ():
                fits = any(fnmatchcase(name, pattern) for pattern in patterns)
                parameter.requires_grad_(fits is kept and parameter.requires_grad)

    def _alone(self, model: Any, name: str) -> Any:
        """A copy of the model in which one part is real and stand-ins are in the place of all others."""
        return with_stand_ins(model, {other: _never for other in self.anatomy.names if other != name})

    def _tied(self) -> dict[str, str]:
        inside = dict(self.whole.named_parameters(remove_duplicate=False))
        pairs = self.bare.all_tied_weights_keys.items()
        apart = {name for part in self.anatomy.names for name in _names(part, self.whole.get_submodule(part))}
        return {
            second: first
            for second, first in pairs
            if first in inside and second in inside and second in apart
        }

    def _shard_plan(self) -> dict[str, str]:
        """Its experts, wherever they are, and for the rest its own `tp_plan`. The head's table and the
        embedding's are split alike, for they may be one. An embedding that does more than look up is whole,
        and so is what is tied to it.
        """
        inner = getattr(self.config.get_text_config(), "base_model_tp_plan", None) or {}
        experts = expert_patterns(self.bare)
        if not inner and not experts:
            return {}
        prefix = self.bare.base_model_prefix
        found = {f"{prefix}.{pattern}": style for pattern, style in inner.items()}
        found |= dict(type(self.bare)._tp_plan or {})
        table = next((n for n in self.anatomy.names if n.endswith("embed_tokens")), None)
        if table is not None and table not in found:
            found[table] = "embedding_rowwise"
        if table is not None and queued_forward(self.bare.get_submodule(table)) is not QueuedEmbedding:
            tied = next((pair for pair in self._tied().items() if f"{table}.weight" in pair), (table,))
            found |= {name.removesuffix(".weight"): "replicated" for name in (table, *tied)}
        return experts | _known(experts, from_theirs(found))

    def _heads(self) -> dict[str, int | None]:
        text = self.config.get_text_config()
        split = {"column", "row"} & set(self._shard_plan().values())
        keys = ["num_attention_heads", "num_key_value_heads"] if split else []
        if expert_patterns(self.bare):
            keys += [key for key in NUMBERS_OF_EXPERTS if getattr(text, key, None)][:1]
        return {key: getattr(text, key, None) for key in keys}

    def _cost(self, name: str) -> float:
        """Multiplications per token: of experts only those that a token is sent to, of a table none."""
        text = self.config.get_text_config()
        experts = next((n for key in NUMBERS_OF_EXPERTS if (n := getattr(text, key, None))), 1)
        share = min(1.0, (getattr(text, "num_experts_per_tok", None) or experts) / experts)
        part: nn.Module = self.whole.get_submodule(name)
        tables = {id(p) for m in part.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        cost = 1e-3
        for key, parameter in part.named_parameters():
            weight = 0.05 if id(parameter) in tables and name in self.anatomy.before else 1.0
            cost += parameter.numel() * (share if ".experts." in f".{key}" else weight)
        return cost


def _holds_documents(batch: Mapping[str, Any]) -> bool:
    """With a mask of its own, or where a recurrent layer is told the documents, a batch says enough."""
    positions = batch.get("position_ids")
    if positions is None or positions.ndim != 2 or not {"attention_mask", "seq_idx"}.isdisjoint(batch):
        return False
    return bool((positions[:, 1:] <= positions[:, :-1]).any())


NUMBERS_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def expert_patterns(model: nn.Module) -> dict[str, str]:
    """The experts in a model as a plan of shards, found by their form and not by the architecture's name."""
    names = [name for name, module in model.named_modules() if _is_experts(module)]
    return {re.sub(r"\.\d+(?=\.)", ".*", name): "experts" for name in names}


def _is_experts(module: nn.Module) -> bool:
    """Every parameter of its own has a row for each expert, and it takes hidden states, the experts of each
    token and their weights.
    """
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    rows = {parameter.shape[0] if parameter.ndim > 1 else 1 for parameter in own}
    stacked = len(rows) == 1 and max(rows) > 1 and any(parameter.ndim == 3 for parameter in own)
    return stacked and len(inspect.signature(module.forward).parameters) == 3


def _known(experts: Mapping[str, str], plan: Mapping[str, str]) -> dict[str, str]:
    """A plan without what it says of experts. What is split in a way that we do not know (latent attention,
    sinks) stays whole, with all that is split beside it and in it.
    """
    rest = {
        pattern: style
        for pattern, style in plan.items()
        if not any(pattern == one or pattern.startswith(f"{one}.") for one in experts)
    }
    unknown = [pattern for pattern, style in rest.items() if style not in STYLES]
    whole = {*unknown, *(pattern.rpartition(".")[0] for pattern in unknown)}
    return {
        pattern: style
        for pattern, style in rest.items()
        if pattern not in whole and pattern.rpartition(".")[0] not in whole
    }


def _share(module: nn.Module, like: nn.Module) -> None:
    """A parameter that has two names inside a part of the model is one."""
    made: dict[nn.Parameter, nn.Parameter | None] = {}
    for part, other in zip(module.modules(), like.modules(), strict=True):
        for key, parameter in other._parameters.items():
            if parameter is not None:
                part._parameters[key] = made.setdefault(parameter, part._parameters[key])


def _names(part: str, module: nn.Module) -> list[str]:
    return [f"{part}.{key}" for key, _ in module.named_parameters()]


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a model in which one part is real was run")


def _list(patterns: str | Sequence[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


# ------------------------------------------------------------------
# The loss of a causal language model: summed over the tokens that count, with their number as its weight.


@dataclass(frozen=True, slots=True)
class CausalLoss:
    """Of (the last stage's output, a batch or targets that are shifted already)."""

    router: float = 0.0  # what the loss of routers is multiplied with

    any_precision = True  # logits come as they are, not in fp32

    def __call__(self, output: Mapping[str, Tensor], targets: Value) -> tuple[Tensor, Tensor]:
        logits = output["logits"]
        total, weight = token_loss(
            logits[:, :-1] if isinstance(targets, Mapping) else logits, _next_tokens(targets)
        )
        if "aux" in output:  # a mean over tokens: as a sum, in proportion
            total = total + self.router * output["aux"] * weight
        return total, weight

    def weigh(self, targets: Value) -> float:
        """The weight alone, from targets on the host: nothing waits for a GPU."""
        return float((_next_tokens(targets) != -100).sum())


def _next_tokens(targets: Value) -> Tensor:
    """For every position the token that follows it."""
    if not isinstance(targets, Mapping):
        return targets  # type: ignore[no-any-return]
    return labels_of(targets)[:, 1:]


def labels_of(batch: Mapping[str, Tensor]) -> Tensor:
    """A batch's labels; without them its tokens, padding left out."""
    if "labels" in batch:
        return batch["labels"]
    mask, tokens = batch.get("attention_mask"), batch["input_ids"]
    return tokens if mask is None else tokens.masked_fill(mask == 0, -100)
