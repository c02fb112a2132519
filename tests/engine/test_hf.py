"""Models of transformers, cut into stages: the losses and gradients of the whole model, under any cut."""

import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline import by_name, run_step, stages
from torch import Tensor, nn

from everstep.engine.datasets.data import Synthetic
from everstep.engine.hf import weights
from everstep.engine.hf.model import hf
from everstep.engine.layers.model import Model, partition, skeleton, slots
from everstep.engine.layers.taken_over import share_in_two
from everstep.engine.prepare.preflight import preflight
from everstep.engine.prepare.program import Program
from everstep.engine.stage.evaluation import Evaluation
from everstep.engine.stage.stage import Stage
from everstep.errors import UserError
from everstep.job.job import DataSpec, Job, ModelSpec

transformers = pytest.importorskip("transformers")
NUMBERS = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL = {**NUMBERS, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA = "llama, tied"
_GEMMA = "gemma2: scaled embeddings, two kinds of layers"
_MIXTRAL = "mixtral: experts, a router's loss"
_GPT2 = "gpt2: no plan, Conv1D, positions added"
_DSA = "glm_moe_dsa: layers take indices of the layer before"
# By class and arguments: loading classes of transformers takes seconds, also where no test here is run.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    LLAMA: ("LlamaConfig", {**SMALL, "tie_word_embeddings": True}),
    _GEMMA: ("Gemma2Config", {**SMALL, "sliding_window": 4}),
    _GPT2: (
        "GPT2Config",
        {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 64, "n_positions": 64}
        | {"bos_token_id": 0, "eos_token_id": 0},
    ),
    _MIXTRAL: ("MixtralConfig", {**SMALL, "num_local_experts": 4, "output_router_logits": True}),
    "falcon: layers give tuples": ("FalconConfig", {**NUMBERS, "alibi": True}),
}
# Layers that get more than hidden states, or other ones.
PASSING: dict[str, tuple[str, dict[str, Any]]] = {
    "bert: a bias with two names in its head": ("BertConfig", {**NUMBERS, "is_decoder": True}),
    _DSA: (
        "GlmMoeDsaConfig",
        {
            **SMALL,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "indexer_types": ["full", "shared", "shared", "shared"],
            "head_dim": 8,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 4,
        },
    ),
    "rwkv: layers give a state": (
        "RwkvConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4}
        | {"attention_hidden_size": 32, "context_length": 64},
    ),
    "deepseek_v4: streams of hidden states, layers that take tokens": (
        "DeepseekV4Config",
        {
            **SMALL,
            "num_key_value_heads": 1,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "q_lora_rank": 16,
            "o_lora_rank": 8,
            "o_groups": 2,
            "hc_mult": 2,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 4,
            "sliding_window": 8,
        },
    ),
}


@cache
def config_of(name: str) -> Any:
    """A configuration of transformers; a test of a model that its version lacks is skipped."""
    kind, numbers = (CONFIGS | PASSING)[name]
    made = getattr(transformers, kind, None)
    if made is None or (name == _DSA and "indexer_types" not in inspect.signature(made).parameters):
        pytest.skip(f"this version of transformers has no such {kind}")
    return made(**numbers)


PLAIN = Synthetic(vocab=64, sequence=16, rows=2, seed=3)


class Masked:
    """Rows of different lengths: masks, and tokens that do not count."""

    def batch(self, step: int, microbatch: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(100 * step + microbatch)
        ids = torch.randint(3, 64, (2, 12), generator=draw)
        mask = torch.ones_like(ids)
        mask[1, 5 + microbatch :] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def step_of(pipeline: list[Stage]) -> tuple[Tensor, dict[str, Tensor]]:
    losses = run_step(pipeline, 1, 2, (1, 0))
    return losses, by_name(pipeline, [stage.take_gradients() for stage in pipeline])


def masters(pipeline: list[Stage]) -> dict[str, Tensor]:
    return by_name(pipeline, [stage.masters for stage in pipeline])


def without_dropout(config: Any) -> Any:
    return type(config)(
        **config.to_dict() | {k: 0.0 for k in config.to_dict() if "dropout" in k or "pdrop" in k}
    )


@pytest.mark.parametrize("name", CONFIGS | PASSING)
def test_losses_and_gradients_are_those_of_transformers_under_every_cut(name: str) -> None:
    config = without_dropout(config_of(name))
    model = hf(config)
    pipeline = stages(model, 3, Masked(), seed=3)
    losses, gradients = step_of(pipeline)

    whole = transformers.AutoModelForCausalLM.from_config(config)
    whole.load_state_dict(masters(pipeline), strict=False)
    for microbatch in range(2):
        batch = Masked().batch(1, microbatch)
        tokens = int((batch["labels"][:, 1:] != -100).sum())
        assert pipeline[0].weight(1, microbatch) == tokens
        loss = whole.train()(**batch, use_cache=False).loss * tokens
        assert torch.allclose(losses[microbatch], loss.detach(), rtol=1e-6)
        loss.backward()
    second = dict(model.tied)
    largest = max(one.norm() for one in gradients.values())  # rounding is that of what was added up
    for key, parameter in whole.named_parameters():
        ours = gradients[key] + (gradients[second[key]] if key in second else 0)
        wanted = torch.zeros_like(ours) if parameter.grad is None else parameter.grad  # None: of an index
        assert (ours - wanted).norm() <= 1e-6 * wanted.norm() + 1e-9 * largest, key


@pytest.mark.parametrize("name", [LLAMA, _GPT2])
def test_every_cut_has_the_same_bits_and_so_has_a_recompute(name: str) -> None:
    """With dropout, where the model has it: draws are a function of the layer, not of the stage."""
    model = hf(config_of(name))
    losses, gradients = step_of(stages(model, 1, Masked(), seed=3))
    for count, recompute in ((2, 0), (2, 1), (2, 2), (len(model.layers) - 2, 0)):
        pipeline = stages(model, count, Masked(), seed=3, recompute=recompute)
        again, found = step_of(pipeline)
        assert torch.equal(again, losses)
        assert all(torch.equal(found[key], gradients[key]) for key in gradients)


def test_names_are_the_models_own_and_edges_stay_whole() -> None:
    model = hf(config_of(_GPT2))
    assert model.names[:3] == ["transformer.wte", "transformer.wpe", "transformer.h.0"]
    assert model.names[-2:] == ["transformer.ln_f", "lm_head"]
    assert model.tied == (("transformer.wte.weight", "lm_head.weight"),)
    named = {name for name, _ in transformers.GPT2LMHeadModel(config_of(_GPT2)).named_parameters()}
    assert {*slots(model, range(len(model.layers)))} == named | {"lm_head.weight"}
    for count in range(1, 7):
        cuts = {part.start for part in partition(model, count)}
        assert not cuts & {1, len(model.layers) - 1}
    with pytest.raises(UserError, match="the model has 6 layers"):
        partition(model, 7)


def test_weight_gradients_are_ops_of_their_own_also_of_stacked_experts() -> None:
    shares = {
        name: share_in_two([skeleton(model, layer) for layer in model.layers])
        for name, model in ((name, hf(config_of(name))) for name in CONFIGS)
    }
    assert all(share > 0.95 for share in shares.values())


# ------------------------------------------------------------------ from a folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name in CONFIGS:
        torch.manual_seed(1)
        made[name] = tmp_path_factory.mktemp("hf") / "model"
        whole = transformers.AutoModelForCausalLM.from_config(config_of(name))
        whole.save_pretrained(made[name], max_shard_size="20kB")
    return made


@pytest.mark.parametrize("name", ["llama, tied", "mixtral: experts, a router's loss"])
def test_a_stage_starts_from_the_folders_weights_and_reads_no_others(
    folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = transformers.AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    expected = whole.state_dict()
    read: list[str] = []
    real = weights.safe_open

    class Counted:
        def __init__(self, path: Path, framework: str) -> None:
            self.file = real(path, framework=framework)

        def __enter__(self) -> "Counted":
            return self

        def __exit__(self, *args: object) -> None:
            self.file.__exit__(*args)

        def get_slice(self, key: str) -> Any:
            read.append(key)
            return self.file.get_slice(key)

    monkeypatch.setattr(weights, "safe_open", Counted)
    model = hf(folders[name])
    assert read == []
    for layers in partition(model, 3):
        stage = Stage(model, layers, data=Masked(), device=torch.device("cpu"))
        values = stage.views(stage.masters)
        assert values.keys() == {*slots(model, layers)}
        assert all(torch.equal(value, expected[key]) for key, value in values.items())
        own = {model.names[index] for index in layers}
        tied = {"model.embed_tokens"} if layers.stop == len(model.layers) else set()
        assert {key for key in read if not any(key.startswith(f"{layer}.") for layer in own | tied)} == set()
        read.clear()


def test_a_folder_can_be_taken_for_its_config_alone(folders: dict[str, Path]) -> None:
    drawn = masters(stages(hf(folders["llama, tied"], weights=False), 1, Masked(), seed=1))
    other = masters(stages(hf(config_of(LLAMA)), 1, Masked(), seed=1))
    assert all(torch.equal(drawn[key], other[key]) for key in drawn)
    shallow = hf(folders["llama, tied"], weights=False, num_hidden_layers=1)
    assert len(shallow.layers) == 4


# ------------------------------------------------------------------ frozen parameters


class Adapter(nn.Module):
    """What LoRA does, in ten lines."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, device=base.weight.device)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=base.weight.device)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(model: Any) -> None:
    model.requires_grad_(False)
    for module in list(model.modules()):
        if isinstance(getattr(module, "q_proj", None), nn.Linear):
            module.q_proj = Adapter(module.q_proj)


def injected(model: Any) -> None:
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), model)


class Named(nn.Module):
    """An adapter around the head: the tied weight then has a name that the model does not know as tied."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x)


def adapted_head(model: Any) -> None:
    model.lm_head = Named(model.lm_head)


def test_an_adapter_of_a_tied_head_is_refused_with_the_two_ways_out(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"leave adapters of embed_tokens and lm_head out, or set tie_word"):
        stages(hf(folders["llama, tied"], prepare=adapted_head), 2, Masked(), seed=3)


def by_pattern(folder: Path) -> Model:
    return hf(folder, train=["*.q_proj.weight", "model.norm.weight"])


@pytest.mark.parametrize(
    ("make", "trained"),
    [
        (by_pattern, 4 * 32 * 32 + 32),
        (lambda folder: hf(folder, prepare=adapted), 4 * 2 * 2 * 32),
        pytest.param(
            lambda folder: hf(folder, prepare=injected), 4 * 2 * 2 * 32, marks=pytest.mark.slow
        ),  # importing peft takes seconds
    ],
    ids=["by pattern", "own adapters", "peft"],
)
def test_frozen_parameters_keep_their_values_and_get_no_optimizer(
    folders: dict[str, Path], make: Any, trained: int
) -> None:
    model = make(folders["llama, tied"])
    losses, gradients = step_of(stages(model, 2, Masked(), seed=3))
    assert sum(gradient.numel() for gradient in gradients.values()) == trained
    assert all(gradient.any() for key, gradient in gradients.items() if "down" not in key and "_A" not in key)
    full, _ = step_of(stages(hf(folders["llama, tied"]), 2, Masked(), seed=3))
    assert torch.equal(losses, full)  # adapters start as nothing
    again, found = step_of(stages(model, 3, Masked(), seed=3))
    assert torch.equal(again, losses)
    assert all(torch.equal(found[key], gradients[key]) for key in gradients)
    assert program(model, stages=2).rules().tied is None  # the tied pair is frozen: nothing to add up


def test_a_tied_pair_that_is_trained_is_added_up_over_its_two_stages() -> None:
    assert program(hf(config_of(LLAMA)), stages=3).rules().tied == (0, 2)
    assert program(hf(config_of(LLAMA)), stages=1).rules().tied is None


def program(model: Model, stages: int) -> Program:
    shape = Job(model=ModelSpec(build="in-the:script"), stages=stages)
    return Program(shape, model, Masked(), lambda named: torch.optim.SGD(named, lr=1.0))


# ------------------------------------------------------------------ jobs, and mistakes


def job(folder: Path, **options: Any) -> Job:
    return Job(
        model=ModelSpec(hf=folder.name, options=options),
        data=DataSpec(kind="synthetic", rows=2, sequence=12),
        stages=2,
        base=str(folder.parent),
    )


def test_a_job_names_what_to_prepare(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(json)("mine_for_hf")
    module.adapted = adapted
    monkeypatch.setitem(__import__("sys").modules, "mine_for_hf", module)
    checked = preflight(job(folders["llama, tied"], prepare="mine_for_hf:adapted"))
    assert checked.parameters == 4 * 2 * 2 * 32


def test_a_job_names_a_folder(folders: dict[str, Path]) -> None:
    checked = preflight(job(folders["llama, tied"], num_hidden_layers=3, weights=False))
    assert checked.model.names[1:4] == [f"model.layers.{i}" for i in range(3)]
    assert int(checked.batch[0].max()) < 64
    card = job(folders["llama, tied"], num_hidden_layers=3).model_card()
    assert card["hf_config"]["num_hidden_layers"] == 3
    assert json.loads(json.dumps(checked.model.assembly.card))["hf_config"]["model_type"] == "llama"
    assert checked.notes == ()
    assert job(folders["llama, tied"]).most_stages() == 6 == len(partition(checked.model, 5)) + 1
    assert preflight(job(folders["mixtral: experts, a router's loss"])).notes == ()


def test_mistakes_are_one_sentence(folders: dict[str, Path], tmp_path: Path) -> None:
    llama = folders["llama, tied"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "nothing-we-know"}')
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((llama / "config.json").read_text())
    wrong = [
        (lambda: hf("meta-llama/Nothing"), "is not a folder; download it first, with hf download"),
        (lambda: hf(tmp_path / "empty"), "has no config.json"),
        (lambda: hf(tmp_path / "odd"), "cannot be read"),
        (lambda: hf(3), "hf was given a int; give a folder"),
        (lambda: hf(tmp_path / "bare", weights=True), "has no safetensors"),
        (lambda: hf(llama, num_hidden_layer=2), "of a LlamaConfig; did you mean 'num_hidden_layers'?"),
        (lambda: hf(llama, train="*.query.*"), "train names '*.query.*', which fits no parameter such as"),
        (lambda: hf(llama, train="*", freeze="*"), "train and freeze are both given"),
        (lambda: hf(llama, prepare=lambda model: model.nothing), "prepare raised AttributeError"),
        (lambda: hf(transformers.OPTConfig(layerdrop=0.1)), "layerdrop is above 0"),
        (lambda: hf(transformers.T5Config()), "is not a causal language model"),
        (lambda: preflight(job(llama, intermediate_size=32)), "down_proj.weight has shape (32, 48) in"),
        (lambda: hf(llama, num_hidden_layers=5), "has no weights for model.layers.4."),
        (lambda: preflight(job(llama, max_position_embeddings=4)), "12 tokens, and the model takes 4"),
    ]
    for make, says in wrong:
        with pytest.raises(UserError) as caught:
            make()
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'transformers"):
        hf(config_of(LLAMA))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_bf16_is_the_same_under_every_cut_and_near_fp32() -> None:
    """XGLM makes its table of positions in the precision of the model, Llama its rotary one in fp32."""
    xglm = transformers.XGLMConfig(
        vocab_size=64, d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, layerdrop=0.0, dropout=0.0
    )
    for config in (config_of(LLAMA), xglm):
        model = hf(config)
        exact, _ = step_of(stages(model, 1, Masked(), seed=3))
        losses, gradients = step_of(stages(model, 1, Masked(), seed=3, precision="bf16"))
        again, found = step_of(stages(model, 2, Masked(), seed=3, precision="bf16"))
        assert torch.allclose(losses, exact, rtol=1e-3)
        assert torch.equal(losses, again)
        assert all(torch.equal(found[key], gradients[key]) for key in gradients)


class Plus(Masked):
    def __init__(self, **more: Any) -> None:
        self.more = more

    def batch(self, step: int, microbatch: int) -> dict[str, Any]:
        return {**super().batch(step, microbatch), **self.more}


@pytest.mark.parametrize("key", ["loss_mask", "token_type_ids", "inputs_embeds"])
def test_a_key_of_a_batch_that_would_change_nothing_is_refused(key: str) -> None:
    work = Job(model=ModelSpec(build="x:y"), data=DataSpec(kind="synthetic"))
    with pytest.raises(UserError, match=f"data gives '{key}', which LlamaForCausalLM does not take"):
        preflight(work, model=hf(config_of(LLAMA)), data=Plus(**{key: torch.ones(2, 12)}))


def test_the_lengths_of_packed_documents_reach_attention_on_every_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[dict[str, Any]] = []
    interface = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    sdpa = interface["sdpa"]

    def looking(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return sdpa(*args, **kwargs)

    monkeypatch.setitem(interface._global_mapping, "sdpa", looking)
    packed = {"cu_seq_lens_q": torch.tensor([0, 8, 24], dtype=torch.int32), "max_length_q": 16}
    pipeline = stages(hf(config_of(LLAMA)), 2, Plus(**packed))
    run_step(pipeline, 1, 1)
    assert len(seen) == 4
    for given in seen:
        assert torch.equal(given["cu_seq_lens_q"], packed["cu_seq_lens_q"])
        assert given["max_length_q"] == 16


def test_evaluation_draws_no_dropout_of_the_models_frame() -> None:
    """GPT-2 drops after its embeddings, in a module without parameters that no stage holds."""
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64, embd_pdrop=0.5, bos_token_id=0
    )
    evaluation = Evaluation(data=Masked(), every=1, batches=1, steps=3, microbatches=1)
    scores = []
    for form in (config, without_dropout(config)):
        pipeline = stages(hf(form), 2, Masked(), evaluation=evaluation)
        run_step(pipeline, 2, 1)
        scores.append(pipeline[-1].scores(2, 0))
        assert pipeline[0]._through.frame.transformer.drop.training
    assert scores[0] == scores[1] != ()


def frozen_and_still(model: Any) -> None:
    model.model.layers[0].requires_grad_(False).eval()


def test_what_prepare_has_put_into_eval_stays_there() -> None:
    config = transformers.LlamaConfig(**SMALL, attention_dropout=0.5)
    stage = stages(hf(config, prepare=frozen_and_still), 1, Masked())[0]
    layers = stage._modules[1:3]
    assert [layer.self_attn.training for layer in layers] == [False, True]


MOE = {
    "deepseek_v3": {
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 3},
}


@pytest.mark.parametrize("kind", MOE)
def test_what_transformers_keeps_in_fp32_reaches_its_module_in_fp32(kind: str, tmp_path: Path) -> None:
    numbers = {**SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 16, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, **numbers, **MOE[kind])
    pipeline = stages(hf(config), 2, Masked(), precision="bf16")
    losses, gradients = step_of(pipeline)
    frames = [stage._through.frame for stage in pipeline]
    gates = [part for frame in frames for name, part in frame.named_modules() if name.endswith("mlp.gate")]
    kept = [tensor for gate in gates for tensor in (*gate.buffers(), *named_in(gate, "moe_statics"))]
    assert len(gates) >= 3
    assert kept
    assert {tensor.dtype for tensor in kept} == {torch.float32}
    if kind == "ernie4_5_moe":  # the gate too, which is trained
        assert {gate.weight.dtype for gate in gates} == {torch.float32}
    whole = transformers.AutoModelForCausalLM.from_config(config)
    whole.load_state_dict(masters(pipeline), strict=False)
    whole.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    batch = Masked().batch(1, 0)
    tokens = int((batch["labels"][:, 1:] != -100).sum())
    assert float(losses[0]) == pytest.approx(theirs(**batch).loss.item() * tokens, rel=2e-3)
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


def named_in(module: nn.Module, part: str) -> list[Tensor]:
    return [p for name, p in module.named_parameters() if part in name]


@pytest.mark.skipif("ApertusConfig" not in dir(transformers), reason="an older transformers")
def test_what_a_model_sets_when_it_is_built_alone_cannot_be_drawn_by_the_seed(tmp_path: Path) -> None:
    """Apertus' activation began with 0 in the place of its constants."""
    config = transformers.ApertusConfig(**SMALL, pad_token_id=0)
    tokens = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
    with pytest.raises(
        UserError, match=r"act_fn.alpha_p is set when ApertusForCausalLM is built and not when"
    ):
        hf(config).assembly.check(tokens, tokens)
    transformers.ApertusForCausalLM(config).save_pretrained(tmp_path / "apertus")
    hf(tmp_path / "apertus").assembly.check(tokens, tokens)


def test_positions_made_of_a_mask_of_ones_are_cut_too(tmp_path: Path) -> None:
    """OPT without padding: its second stage added that mask to the hidden states."""
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.0,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    table = {"model": {"hf": str(tmp_path)}, "data": {"kind": "synthetic", "rows": 2, "sequence": 8}}
    losses = []
    for number in (1, 2):
        program, given = Program.of(Job.from_dict({**table, "steps": 1, "stages": number})), None
        for stage in range(number):
            made, _ = program.build(stage)
            given = made.forward(1, 0, given)
        losses.append(float(made.loss(1, 0)))
    assert losses[0] == losses[1]
