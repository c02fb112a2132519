"""A pipeline of stages computes what the plain model computes, in any order of W, on any host."""

import gc
import itertools
from functools import partial

import pytest
import torch
from pipeline import CPU, by_name, forward, input_grad, plain, run_step, stages
from torch import Tensor, nn

from everstep.engine import device
from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers import taken_over
from everstep.engine.layers.boundary import Boundary, Gradients
from everstep.engine.layers.gpt import gpt
from everstep.engine.layers.linear import MakingQueue
from everstep.engine.layers.model import Model
from everstep.engine.stage.evaluation import Evaluation
from everstep.engine.stage.stage import Stage, StageSettings
from everstep.errors import InternalError, UserError
from everstep.net import frames
from everstep.net.envelope import Envelope
from everstep.net.plane import DataPlane
from everstep.protocol.parcels import Parcel, ParcelKind

DATA = Synthetic(vocab=64, sequence=16, rows=2, seed=3)
SMALL = {"vocab": 64, "width": 32, "heads": 4, "hidden": 48, "depth": 3}


def weights(pipeline: list[Stage]) -> dict[str, torch.Tensor]:
    return by_name(pipeline, [stage.masters for stage in pipeline])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_and_losses_are_those_of_the_plain_model(count: int, recompute: bool, tied: bool) -> None:
    model = gpt(**SMALL, dropout=0.2, tied=tied, kv_heads=2)
    pipeline = stages(model, count, DATA, recompute=recompute, seed=5)
    losses = run_step(pipeline, 7, 4)
    expected, expected_losses = plain(model, weights(pipeline), DATA, 7, 4, seed=5)
    assert torch.equal(losses, expected_losses)
    gradients = by_name(pipeline, [stage.take_gradients() for stage in pipeline])
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        # The products are the same bits; only the sum over microbatches is better here.
        assert relative(gradient, expected[name]) < 2e-7, name


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_leaves_no_cycle_that_would_keep_its_memory(recompute: bool) -> None:
    """A cycle is freed when Python collects garbage, which knows nothing of a GPU's memory."""
    pipeline = stages(gpt(**SMALL), 2, DATA, recompute=recompute)
    run_step(pipeline, 0, 2)
    gc.collect()
    gc.disable()
    gc.freeze()  # threads of tests before this one let go of theirs now
    try:
        run_step(pipeline, 1, 2)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [tuple(one.shape) for one in gc.garbage if isinstance(one, torch.Tensor)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


def test_one_microbatch_gives_the_bits_of_the_plain_model() -> None:
    model = gpt(**SMALL, dropout=0.2)
    pipeline = stages(model, 3, DATA, accumulate="fp32")
    run_step(pipeline, 0, 1)
    expected, _ = plain(model, weights(pipeline), DATA, 0, 1)
    for name, gradient in by_name(pipeline, [stage.take_gradients() for stage in pipeline]).items():
        assert torch.equal(gradient.float(), expected[name]), name


def test_fp32_accumulation_is_within_rounding_of_the_plain_sum() -> None:
    model = gpt(**SMALL)
    pipeline = stages(model, 2, DATA, accumulate="fp32")
    run_step(pipeline, 0, 8)
    expected, _ = plain(model, weights(pipeline), DATA, 0, 8)
    for name, gradient in by_name(pipeline, [stage.take_gradients() for stage in pipeline]).items():
        assert gradient.dtype == torch.float32
        assert relative(gradient, expected[name]) < 5e-7, name


def test_sums_are_the_same_bits_in_any_order_and_under_any_split() -> None:
    """A re-routed step sums in another order, over other hosts' buffers; the curve must not show it."""
    model = gpt(**SMALL, dropout=0.1)
    sums = []
    for order in [range(6), (5, 3, 1, 0, 2, 4)]:
        pipeline = stages(model, 2, DATA)
        run_step(pipeline, 1, 6, order)
        sums.append([stage.take_gradients().float() for stage in pipeline])
    hosts = [stages(model, 2, DATA) for _ in range(3)]
    parts = [[0, 4], [5], [3, 1, 2]]
    for host, part in zip(hosts, parts, strict=True):
        for microbatch in part:
            forward(host, 1, microbatch)
            input_grad(host, 1, microbatch)
            for stage in host:
                stage.weight_grad(1, microbatch)
    whole = [slice(0, stage.size) for stage in hosts[0]]
    means = [torch.empty(stage.size) for stage in hosts[0]]
    for s, stage in enumerate(hosts[1]):
        stage.sums.means(whole[s], [whole[s]], [host[s].sums.part(whole[s]) for host in hosts], 1, means[s])
    sums.append(means)
    for a, b in itertools.combinations(sums, 2):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        again = self.inner(self.inner(x).relu())
        return self.outer(again) + nn.functional.linear(x, self.outer.weight)  # also without its module


class _Rows:
    def batch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(100 * step + microbatch)
        x, y = torch.randn(2, 64, 8, generator=draw)
        return x, y


@pytest.mark.parametrize("kind", ["gpt", "twice", "recompute"])
def test_gradients_made_in_i_by_torch_or_by_us_have_the_bits_of_those_made_in_w(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _Rows() if kind == "twice" else DATA
    model = Model({"a": _Twice, "b": _Twice}, nn.functional.mse_loss) if kind == "twice" else gpt(**SMALL)

    def trained() -> tuple[Tensor, list[int], int]:
        (stage,) = stages(model, 1, data, recompute=int(kind == "recompute"))
        for microbatch in range(3):
            stage.forward(1, microbatch)
            stage.input_grad(1, microbatch)
            held = stage.stash_bytes()
            stage.weight_grad(1, microbatch)
        stage.sums.settle()
        return stage.sums.flat, stage.sums.peaks, held

    by_torch = trained()
    monkeypatch.setattr(taken_over, "_in_one", lambda part, queued: queued)
    made = trained()
    monkeypatch.setattr(MakingQueue, "append", list.append)
    later = trained()
    assert torch.equal(by_torch[0], made[0])
    assert torch.equal(made[0], later[0])
    assert by_torch[1] == made[1] == later[1]
    assert made[2] < later[2]


class _Across(nn.Module):
    """Linears whose inputs and gradients lie across in memory, have other ranks, or are used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns, self.frozen = nn.Linear(8, 8), nn.Linear(64, 64), nn.Linear(8, 8)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.columns(x.t()).t()
        folded = self.rows(x.view(4, 16, 8).transpose(0, 1)).transpose(0, 1).reshape(64, 8)
        thrice = self.rows(x.view(2, 8, 4, 8)).view(64, 8) + self.rows(self.rows(x).tanh())
        return x + mixed + folded + thrice + self.frozen(x.view(4, 16, 8).transpose(0, 1)).reshape(64, 8)


@pytest.mark.parametrize("kind", ["gpt", "tied", "recompute", "across", "twice"])
def test_one_stage_has_the_bits_of_two(kind: str) -> None:
    """A task that is reshaped goes on with the bits it would have had."""
    across = {"across": _Across, "twice": _Twice}.get(kind)
    if across is None:
        data, model = DATA, gpt(**SMALL, tied=kind == "tied")
    else:
        data, model = _Rows(), Model({"a": across, "b": across}, nn.functional.mse_loss)
    found = []
    for count in (1, 2):
        made = stages(model, count, data, recompute=int(kind == "recompute"))
        run_step(made, 1, 3)
        found.append(by_name(made, [stage.take_gradients() for stage in made]))
    one, two = found
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_any_worker_builds_the_same_weights_and_only_its_own() -> None:
    model = gpt(**SMALL, tied=True)
    whole = weights(stages(model, 1, DATA, seed=2))
    torch.manual_seed(99)
    parts = stages(model, 4, DATA, seed=2)
    assert all(torch.equal(value, whole[name]) for name, value in weights(parts).items())
    assert torch.equal(whole["embed.tokens.weight"], whole["head.logits.weight"])
    assert [name.split(".")[0] for name in parts[0].slots if "head" in name] == []
    assert parts[0].tied_names == ("embed.tokens.weight",)
    assert parts[-1].tied_names == ("head.logits.weight",)


def test_a_redone_forward_is_the_same_whatever_the_host_did_before() -> None:
    model = gpt(**SMALL, dropout=0.5)
    one, other = stages(model, 1, DATA)[0], stages(model, 1, DATA)[0]
    one.forward(4, 2)
    for microbatch in (0, 3, 2):
        torch.rand(5)
        other.forward(4, microbatch)
    assert torch.equal(one.loss(4, 2), other.loss(4, 2))
    assert not torch.equal(other.loss(4, 3), other.loss(4, 2))


def test_discarded_work_leaves_no_trace() -> None:
    model = gpt(**SMALL)
    clean, dirty = stages(model, 1, DATA)[0], stages(model, 1, DATA)[0]
    for stage in (clean, dirty):
        if stage is dirty:
            for microbatch in range(3):
                stage.forward(0, microbatch)
            stage.input_grad(0, 0)
            stage.input_grad(0, 1)
            stage.weight_grad(0, 0)
            assert stage.stash_bytes() > 0
            stage.discard(0)
            assert stage.stash_bytes() == 0
        run_step([stage], 0, 2)
    assert torch.equal(clean.take_gradients(), dirty.take_gradients())


def test_discarding_a_step_keeps_what_an_earlier_one_has_stashed() -> None:
    """A ghost of step 0 may be asked for its I after the update of step 0 was undone and step 1 discarded."""
    stage = stages(gpt(**SMALL), 1, DATA)[0]
    stage.forward(0, 0)
    stage.forward(1, 0)
    stage.discard(1)
    stage.input_grad(0, 0)
    with pytest.raises(InternalError):
        stage.input_grad(1, 0)


def test_before_w_a_microbatch_has_left_no_trace_in_the_buffer() -> None:
    stage = stages(gpt(**SMALL), 1, DATA)[0]
    stage.forward(0, 0)
    stage.input_grad(0, 0)
    assert not stage.take_gradients().any()
    stage.weight_grad(0, 0)
    gradients = stage.take_gradients()
    assert all(view.any() for view in stage.views(gradients).values())


def test_sums_that_begin_anew_are_empty_and_refuse_another_step() -> None:
    stage = stages(gpt(**SMALL), 1, DATA)[0]
    run_step([stage], 1, 2)
    stage.sums.begin(2, stage.limits.at(2))
    assert not stage.sums.values().any()
    with pytest.raises(InternalError, match="step 1 for the sums of step 2"):
        run_step([stage], 1, 1)


def test_recompute_holds_less_between_f_and_i() -> None:
    held = {}
    for recompute in (False, True):
        stage = stages(gpt(**SMALL), 1, DATA, recompute=recompute)[0]
        stage.forward(0, 0)
        held[recompute] = stage.stash_bytes()
    assert 0 < held[True] < held[False] / 2


def test_ops_out_of_turn_are_refused() -> None:
    stage = stages(gpt(**SMALL), 1, DATA)[0]
    with pytest.raises(InternalError, match="no forward"):
        stage.input_grad(0, 0)
    stage.forward(0, 0)
    with pytest.raises(InternalError, match="twice"):
        stage.forward(0, 0)
    with pytest.raises(InternalError, match="before the input"):
        stage.weight_grad(0, 0)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_bf16_computes_in_bf16_and_sums_in_full() -> None:
    model = gpt(**SMALL)
    pipeline = stages(model, 2, DATA, precision="bf16", accumulate="fp32")
    losses = run_step(pipeline, 0, 4)
    assert losses.dtype == torch.float32
    boundary = pipeline[0].forward(1, 0)
    assert boundary is not None
    assert boundary.tensors[0].dtype == torch.bfloat16
    expected, expected_losses = plain(model, weights(pipeline), DATA, 0, 4)
    assert relative(losses, expected_losses) < 1e-2
    for name, gradient in by_name(pipeline, [stage.take_gradients() for stage in pipeline]).items():
        assert gradient.dtype == torch.float32
        assert relative(gradient, expected[name]) < 5e-2, name


class Regression:
    def batch(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.sin(torch.arange(12.0).reshape(3, 4) + 7 * step + microbatch)
        return x, x.sum(1, keepdim=True)


class Odd(nn.Module):
    """A user's layer with what we do not take over: a bare parameter, a buffer, a frozen weight, a view."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.register_buffer("shift", torch.full((4,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(x * self.scale) + self.shift
        return self.attend(y[None], y[None], y[None], need_weights=False)[0].view_as(x)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_a_users_own_layers_train_too() -> None:
    layers = [lambda: nn.Linear(4, 4), Odd, nn.Tanh, lambda: nn.Linear(4, 1)]
    model = Model(layers=layers, loss=nn.functional.mse_loss)
    for precision in ("fp32", "bf16"):
        pipeline = stages(model, 3, Regression(), precision=precision)
        run_step(pipeline, 0, 3)
        gradients = by_name(pipeline, [stage.take_gradients() for stage in pipeline])
        assert "1.frozen.weight" not in gradients
        assert "1.attend.out_proj.weight" in gradients
        for name, gradient in gradients.items():
            assert gradient.any(), name
    assert not any(p.is_meta or p.device != CPU for stage in pipeline for p in stage.parameters.values())


class Masks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x *= 2  # its own batch: the data's tensors stay as they are
        return {"hidden": self.linear(x), "mask": torch.ones(2, 4)}


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        mask = given["mask"]
        mask *= 0.5
        return self.linear(given["hidden"] * mask)


class SameTensors:
    """A data set that gives its own tensors, not copies."""

    def __init__(self) -> None:
        self.x, self.y = torch.ones(2, 4), torch.ones(2, 1)

    def batch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        return self.x, self.y


def spoiling_loss(output: Tensor, targets: Tensor) -> Tensor:
    targets.zero_()
    return nn.functional.mse_loss(output, targets)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_that_changes_what_was_received_is_named(recompute: bool) -> None:
    data = SameTensors()
    model = Model(layers={"first": Masks, "second": Halves}, loss=spoiling_loss)
    pipe = [
        Stage(model, range(i, i + 1), data=data, device=CPU, settings=StageSettings(recompute=recompute))
        for i in range(2)
    ]
    sent = pipe[0].forward(1, 0)
    with pytest.raises(UserError, match=r"^layer 'second' changes a tensor in place"):
        pipe[1].forward(1, 0, sent)


class Balanced(nn.Linear):
    """A bias of its own that moves with every forward, as routers have."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("bias_of_router", torch.zeros(1))
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.table = x.detach().sum(1)
        if self.training:
            self.bias_of_router.add_(x.detach().sign().mean())
        return super().forward(x) + self.bias_of_router


def test_a_layer_that_changes_its_buffer_on_real_data_is_named() -> None:
    model = Model(layers={"first": Balanced}, loss=nn.functional.mse_loss)
    stage = Stage(model, range(1), data=SameTensors(), device=CPU)
    with pytest.raises(UserError, match=r"^layer 'first' changes its buffer 'bias_of_router' in its forward"):
        stage.forward(1, 0)


class SwitchesOff(nn.Linear):
    def forward(self, value: Tensor) -> Tensor:
        out = super().forward(value)
        torch.set_grad_enabled(False)
        return out


@pytest.mark.parametrize("count", [1, 2])
def test_a_layer_that_switches_gradients_off_for_good_is_refused(count: int) -> None:
    """A loop of torch raises in backward; here its stage was not trained any more, without a word."""
    layers = {"first": partial(SwitchesOff, 4, 8), "second": partial(nn.Linear, 8, 1)}
    model = Model(layers=layers, loss=nn.functional.mse_loss)
    pipeline = stages(model, count, Regression(), seed=1)
    with pytest.raises(UserError, match="switched gradients off and not on again"):
        forward(pipeline, 1, 0)
    assert torch.is_grad_enabled()


def test_what_layers_and_loss_do_to_a_batch_is_not_done_to_the_data() -> None:
    data = SameTensors()
    model = Model(layers={"first": Masks, "second": lambda: TakesHidden()}, loss=spoiling_loss)
    stage = Stage(model, range(2), data=data, device=CPU)
    for microbatch in range(2):
        stage.forward(1, microbatch)
    assert torch.equal(stage.loss(1, 0), stage.loss(1, 1))
    assert torch.equal(data.x, torch.ones(2, 4))
    assert torch.equal(data.y, torch.ones(2, 1))


class TakesHidden(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return super().forward(given["hidden"] * given["mask"])


class Backbone(nn.Module):
    """A frozen part, which its user has put into eval(), and a trained one; both drop."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).requires_grad_(False).eval()
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1)).eval()  # as pretrained models come

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_a_frozen_part_in_eval_stays_there_also_after_an_evaluation() -> None:
    evaluation = Evaluation(data=SameTensors(), every=1, batches=1, steps=3, microbatches=1)
    model = Model(layers=[Backbone], loss=nn.functional.mse_loss)
    stage = Stage(model, range(1), data=SameTensors(), device=CPU, evaluation=evaluation)
    (layer,) = stage._modules
    for step in (1, 2):
        run_step([stage], step, 1)
        modes = [part.training for part in (layer.body, layer.body[1], layer.head, layer.head[0])]
        assert modes == [False, False, True, True]


class SmallTypes(nn.Module):
    def __init__(self, types: list[torch.dtype]) -> None:
        super().__init__()
        self.linear, self.types = nn.Linear(4, 4), types

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        spectrum = torch.fft.rfft(self.linear(x))
        more = {str(dtype): torch.ones(2, 4).to(dtype) for dtype in self.types}
        return {"spectrum": spectrum.conj(), "turned": spectrum.conj().imag, **more}


class TakesTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        x = torch.fft.irfft(given["spectrum"], n=4) + given["turned"].sum()
        rest = [one.float() for name, one in given.items() if name.startswith("torch")]
        return self.linear(x * torch.stack(rest).mean(0))


def test_every_type_of_whole_bytes_crosses_the_edge_of_a_stage() -> None:
    types = [dtype for dtype in frames.DTYPES if dtype not in (torch.complex64, torch.complex128)]
    layers = {"first": lambda: SmallTypes(types), "second": TakesTypes}
    model = Model(layers=layers, loss=nn.functional.mse_loss)
    pipe = [Stage(model, range(i, i + 1), data=SameTensors(), device=CPU) for i in range(2)]
    (whole,) = [Stage(model, range(2), data=SameTensors(), device=CPU)]
    run_step([whole], 1, 1)

    def sent(value: Boundary | Gradients) -> Boundary | Gradients:
        kept = value.moved(lambda tensor: DataPlane.kept(Alone(), tensor))
        parcel = Parcel(ParcelKind.ACTIVATION, 0, 1, 0, None, 0, 0, 1)
        data = frames.encode(parcel, Envelope(beside=kept.facts), *kept.tensors)
        arriving = frames.Incoming(lambda shape, dtype: torch.empty(shape, dtype=dtype))
        for piece in (data, *map(frames.raw, kept.tensors)):
            while len(piece):
                count = min(len(arriving.want), len(piece))
                arriving.want[:count], piece = piece[:count], piece[count:]
                arriving.took(count)
        return type(value).arrived(arriving.tensors, arriving.envelope.beside)

    pipe[1].forward(1, 0, sent(pipe[0].forward(1, 0)))
    pipe[0].input_grad(1, 0, sent(pipe[1].input_grad(1, 0)))
    for stage in pipe:
        stage.weight_grad(1, 0)
    assert torch.equal(pipe[1].loss(1, 0), whole.loss(1, 0))
    expected = whole.views(whole.take_gradients())
    for name, gradient in by_name(pipe, [stage.take_gradients() for stage in pipe]).items():
        assert torch.equal(gradient, expected[name]), name


class Alone:
    """A plane without shared memory or lanes."""

    arena = _lanes = None


def test_an_operation_without_an_exact_kernel_is_told_in_words_of_the_job() -> None:
    told = device.without_exact_kernel(
        RuntimeError(
            "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'. You can turn off determinism ..."
        )
    )
    assert told is not None
    assert told.startswith("cumsum_cuda_kernel has no deterministic kernel on this GPU")
    assert 'accumulate = "fp32"' in told
    assert device.without_exact_kernel(RuntimeError("out of memory")) is None
