# mypy: disable-error-code="override, assignment, attr-defined, name-defined, misc, unused-ignore, call-arg"
# mypy: disable-error-code="no-untyped-call, arg-type"
"""A process group that can wait: what a script's `init_process_group` and `new_group` give in a held run.

It stands around gloo's or NCCL's own group (the *inner* one) and does three things more. Every collective
has a position. It works on copies of what it would change in place (the *stage*), so an inner group that is
abandoned changes nothing of the script's; a stage that is finished is the answer in the log. A rank that
waits for a collective waits until it is done or answered, whatever happens to the inner group meanwhile.

    script ──► run ──► stage ──► inner ──► wait ──► commit (one lock with the hold) ──► script's tensors
                                   ✝ a death: abandoned, made anew, issued again, or answered by a peer

In a newcomer's prelude nothing is issued: it is given what its predecessor was given there.

Members that live and die together (a shard group) need none of this: their collectives are passed on.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroup

from everstep.core.held.ledger import Answer, AnswerError, GroupLedger
from everstep.protocol.held import PRELUDE, Position

if TYPE_CHECKING:
    from everstep.hold.rank import HeldRank

SLICE = timedelta(milliseconds=20)  # gloo cannot be aborted: a wait is cut into these
LONGEST = timedelta(minutes=30)
HEAR_S = 30.0  # a communicator fails before we hear of the death
POLL_S = 0.0001
KEPT_IN_PRELUDE = 64 << 20
Tensors = list[torch.Tensor]
Issue = Callable[[Any, Tensors], Any]  # on an inner group, with these outputs; its work

# What every member is given alike can be answered by any of them; in these all wait for all.
ALIKE = {"allreduce", "broadcast", "allgather", "barrier"}
SYNCHRONIZING = {"allreduce", "allgather", "barrier"}


class Collective:
    """One that a script has issued."""

    __slots__ = (
        "future",
        "in_backward",
        "inner",
        "is_done",
        "is_in_place",
        "issue",
        "kind",
        "outputs",
        "position",
        "shape",
        "stage",
        "work",
    )

    def __init__(self, kind: str, about: str, outputs: Tensors, issue: Issue, *, is_in_place: bool) -> None:
        self.kind, self.outputs, self.issue, self.is_in_place = kind, outputs, issue, is_in_place
        forms = ", ".join([_form(each.dtype, each.shape) for each in outputs[:4]])
        more = f" and {len(outputs) - 4} more" if len(outputs) > 4 else ""
        self.shape = f"{kind}{about} {forms}{more}".strip()
        self.in_backward = torch._C._current_graph_task_id() != -1
        self.position = Position(PRELUDE, 0)
        self.stage: Tensors | None = None
        self.work: Any = None
        self.inner: Any = None  # on which it was issued
        self.future: torch.futures.Future[Tensors] | None = None
        self.is_done = False


@dataclass(slots=True)
class Grave:
    """An abandoned communicator, and what it may still read and write. To destroy it would be to wait."""

    inner: dict[str, Any]
    works: list[Any] = field(default_factory=list)
    stages: list[Tensors | None] = field(default_factory=list)
    aborting: int = 0  # communicators

    def end(self) -> None:
        """gloo's cannot be aborted; its works end when its peers do, or never."""
        for each in {id(each): each for each in self.inner.values() if is_nccl(each)}.values():
            self.aborting += 1
            threading.Thread(target=self._abort, args=(each,), name="everstep-abort", daemon=True).start()

    def _abort(self, inner: Any) -> None:
        inner.abort()
        self.aborting -= 1

    def is_at_rest(self) -> bool:
        """Nothing of it needs to be kept. Of NCCL's the stages are given up; what is left of it is small, and
        its destructor may wait for what is over.
        """
        if self.aborting or not all(each.is_completed() for each in self.works):
            return False
        self.stages, self.works = [], []
        return not any(map(is_nccl, self.inner.values()))


def is_nccl(inner: Any) -> bool:
    return isinstance(inner, getattr(c10d, "ProcessGroupNCCL", ()))


@functools.lru_cache(maxsize=1024)
def _form(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


class HeldWork(dist._Work):
    def __init__(self, group: HeldGroup, one: Collective) -> None:
        super().__init__()
        self._group, self._one = group, one

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.wait_for(self._one)
        return True

    def is_completed(self) -> bool:
        return self._one.is_done

    def is_success(self) -> bool:
        return self._one.is_done

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> Tensors:
        return self._one.outputs

    def get_future(self) -> torch.futures.Future[Tensors]:
        return self._group.future_of(self._one)

    getFuture = get_future


class HeldGroup(ProcessGroup):
    def __init__(
        self,
        rank: HeldRank,
        own: int,
        members: Sequence[int],
        name: str,
        kinds: dict[str, str],
        timeout: timedelta,
    ) -> None:
        """`kinds`: by device, the backend that the script asked for."""
        super().__init__(own, len(members))
        self.held, self.own, self.members = rank, own, tuple(members)
        self.kinds, self.timeout = kinds, min(timeout, LONGEST)
        self.ledger: GroupLedger = rank.book.open_group(name, members)
        self.inner: dict[str, Any] = {}
        self.queue: list[Collective] = []
        self.pool: dict[tuple[Any, ...], Tensors] = {}
        self.opening: list[Answer] | None = None  # a newcomer's answers in its prelude; None: it issues
        self.beginning: list[Answer] | None = None  # all of them, for the newcomers after this one
        self.structure: list[tuple[int, Answer]] = []  # of DDP's buckets, with their interval; kept for good
        self.replayed: list[Answer] = []  # of these, what a newcomer is still to be given
        self._turn, self._wake = threading.RLock(), threading.Semaphore(0)
        self._waits_in: Any = None
        for device, backend in kinds.items():  # C++ asks for a backend now and then: one that knows nobody
            kind = getattr(ProcessGroup.BackendType, backend.upper())
            self._register_backend(torch.device(device), kind, self._make(backend, dist.HashStore(), 0, 1))
            self._set_default_backend(kind)
        rank.opened(self)
        threading.Thread(target=self._finish_futures, name=f"everstep-group-{name}", daemon=True).start()

    @property
    def name(self) -> str:
        return self.ledger.name

    # -------------------------------------------------------------- inner groups

    def _make(self, backend: str, store: dist.Store, own: int, size: int) -> Any:
        if backend == "gloo":
            return c10d.ProcessGroupGloo(store, own, size, timeout=self.timeout)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        if size > 1:
            options.global_ranks_in_group, options.group_name = list(self.members), self.name
        return c10d.ProcessGroupNCCL(store, own, size, options)

    def connect(self, prefix: str) -> dict[str, Any]:
        """An inner group per device. It takes all members to return."""
        made: dict[str, Any] = {}
        for backend in sorted(set(self.kinds.values())):
            store = dist.PrefixStore(f"{prefix}/{self.name}/{backend}", self.held.store)
            inner = self._make(backend, store, self.own, len(self.members))
            if backend == "nccl" and self.held.book.epoch:  # all members are here now
                inner.eager_connect_single_device(self._device())
            made |= {device: inner for device, kind in self.kinds.items() if kind == backend}
        return made

    def abandon(self) -> Grave:
        """Under the lock. It is still to be ended: that may take half a second, and others wait to hear that
        this rank is parked. What an inner group still does reaches nothing of the script."""
        grave = Grave(
            inner=self.inner,
            works=[each.work for each in self.queue if each.work is not None],
            stages=[each.stage for each in self.queue],
        )
        self.held.bury(grave)
        self.inner = {}
        for each in self.queue:
            each.work = each.inner = each.stage = None
        return grave

    # -------------------------------------------------------------- a collective

    def run(
        self, kind: str, outputs: Tensors, issue: Issue, *, about: str = "", is_in_place: bool = False
    ) -> HeldWork:
        one = Collective(kind, about, outputs, issue, is_in_place=is_in_place)
        held = self.held
        with held.lock, torch.no_grad():
            if self.replayed:
                self._take(one, self.replayed.pop(0))
                one.is_done = True
                return HeldWork(self, one)
            if held.book.interval == PRELUDE and self.opening is not None:
                self._begin_as_before(one)
                return HeldWork(self, one)
            if held.book.interval == PRELUDE and one.in_backward:
                held.refuse("it trains before its first everstep.snapshot; call it first in the loop's body")
            one.position = self.ledger.place(held.book.interval)
            self.queue.append(one)
            if held.is_own_answer(self, one):
                return HeldWork(self, one)
            if self._answer(one) is not None:
                if len(self.queue) == 1:
                    self._commit(one)
            elif not self.ledger.is_broken:
                self._issue(one)
        return HeldWork(self, one)

    @property
    def spans_units(self) -> bool:
        return self.held.spans_units(self.members)

    def _issue(self, one: Collective) -> None:
        """A RuntimeError of a peer's death is seen again by who waits."""
        if self.spans_units:
            one.stage = [self._room(each) for each in one.outputs]
            if one.is_in_place and one.outputs:
                torch._foreach_copy_(one.stage, [each.detach() for each in one.outputs])
        else:
            one.stage = one.outputs
        device = one.outputs[0].device.type if one.outputs else next(iter(self.inner))
        one.inner = self.inner[device]
        try:
            one.work = one.issue(one.inner, one.stage)
        except RuntimeError:
            one.work = None
            if not self.held.may_hear_of_a_death:
                raise

    def _room(self, like: torch.Tensor) -> torch.Tensor:
        free = self.pool.get((like.shape, like.dtype, like.device))
        if free:
            return free.pop()
        return torch.empty_like(like, memory_format=torch.contiguous_format).detach()

    def _answer(self, one: Collective) -> Answer | None:
        try:
            return self.ledger.answer(one.position, one.shape)
        except AnswerError as error:
            self.held.give_up(str(error))

    def _take(self, one: Collective, answer: Answer) -> None:
        if answer.shape != one.shape:
            was = f"{one.shape}, where its predecessor issued {answer.shape}"
            self.held.give_up(f"group {self.name}: it issues {was}: the script does not repeat itself")
        for mine, given in zip(one.outputs, answer.outputs or (), strict=False):
            mine.detach().copy_(given)
        one.stage = None

    def _commit(self, one: Collective) -> bool:
        """Under the lock, the first of the queue. False: the rank is held, and this was never done."""
        told = self._answer(one)
        is_kept = self.spans_units and one.kind in ALIKE
        if told is None and one.stage is None:
            return False  # it was abandoned
        outputs = told.outputs if told is not None else one.stage if is_kept else None
        if is_kept and self.held.book.interval == PRELUDE:
            outputs = self.held.kept_in_prelude(outputs)
        if not self.ledger.finish(one.position, Answer(one.shape, outputs)):
            return False
        if told is not None:
            self._take(one, told)
        elif one.stage is not None and one.stage is not one.outputs and one.outputs:
            torch._foreach_copy_([each.detach() for each in one.outputs], one.stage)
        if not self.spans_units:
            self.ledger.log.pop(one.position, None)
            self._give_back(one.stage if one.stage is not one.outputs else None)
        elif not is_kept:
            self._give_back(one.stage)
        elif one.kind in SYNCHRONIZING and one.position.interval > PRELUDE:
            for old in self.held.entered_by_all(self, one.position):
                self._give_back(old.outputs)
        if self.held.is_structural and is_kept:
            copies = [each.detach().clone() for each in one.outputs]
            self.structure.append((one.position.interval, Answer(one.shape, copies)))
        self.queue.remove(one)
        one.is_done, one.work, one.inner, one.stage = True, None, None, None
        if one.future is not None:
            one.future.set_result(one.outputs)
        self.held.committed()
        return True

    def _give_back(self, tensors: Any) -> None:
        for each in tensors or ():
            free = self.pool.setdefault((each.shape, each.dtype, each.device), [])
            if len(free) < 64:
                free.append(each)

    def _begin_as_before(self, one: Collective) -> None:
        """A newcomer's prelude: as its predecessor was answered; what was not kept it has itself."""
        assert self.opening is not None
        one.is_done = True
        if one.in_backward:
            self.held.give_up(
                "it trains before its first everstep.snapshot; call it first in the loop's body"
            )
        if not self.opening or (self.held.is_restored and self.opening[0].shape != one.shape):
            if not self.held.is_restored:
                more = f"group {self.name}: it issues {one.shape} before everstep.restore"
                self.held.give_up(f"{more}, which its predecessor did not")
            return
        self._take(one, self.opening.pop(0))

    # -------------------------------------------------------------- waiting

    def wait_for(self, one: Collective) -> None:
        """Who waits for one ends all before it, in their order."""
        with self.held.waiting():
            while not one.is_done:
                with self._turn:
                    with self.held.lock:  # what is answered leaves the queue without a turn
                        first = self.queue[0] if not one.is_done else one
                    self._end_first(first)

    def drain(self) -> None:
        """Until nothing that was issued is in the air."""
        while (last := next(iter(self.queue[-1:]), None)) is not None:
            self.wait_for(last)

    def _end_first(self, one: Collective) -> None:
        held = self.held
        while not one.is_done:
            if self.ledger.is_broken:
                held.wait_until(lambda: not self.ledger.is_broken)
                continue
            with held.lock, torch.no_grad():
                if self._answer(one) is not None:
                    self._commit(one)
                    continue
                if one.work is None and not self.ledger.is_broken:
                    self._issue(one)
                work, inner = one.work, one.inner
            try:
                is_over = work is not None and self._is_over(inner, work)
            except RuntimeError:
                if not held.hear_of_a_death(self, HEAR_S):
                    raise
                continue
            if not is_over:
                continue
            with held.lock, torch.no_grad():
                if one.inner is inner and one.work is work:
                    self._commit(one)

    def _is_over(self, inner: Any, work: Any) -> bool:
        """False: its group is broken."""
        if is_nccl(inner):
            # NCCL's wait orders streams only, and no kernel may read a result before it is one. With a time
            # limit it would abort the communicator when that is over.
            if not self._until(work.is_completed):  # also by an error of the communicator, which wait raises
                return False
            with torch.cuda.stream(self._stream()):
                work.wait()
                event = torch.cuda.Event()
                event.record()
            return self._until(event.query)
        while not self.ledger.is_broken:
            try:
                work.wait(SLICE)
                return True
            except RuntimeError as error:
                if "imed out" not in str(error):
                    raise
        return False

    def _until(self, is_over: Callable[[], bool]) -> bool:
        while not is_over():
            if self.ledger.is_broken:
                return False
            time.sleep(POLL_S)
        return True

    def _device(self) -> Any:
        return self.held.device or torch.device("cuda", torch.cuda.current_device())

    def _stream(self) -> Any:
        """One that nothing is queued in."""
        if self._waits_in is None:
            self._waits_in = torch.cuda.Stream(self._device())
        return self._waits_in

    def future_of(self, one: Collective) -> torch.futures.Future[Tensors]:
        with self.held.lock:
            if one.future is None:
                devices = sorted({each.device for each in one.outputs if each.is_cuda}, key=str)
                one.future = torch.futures.Future(devices=devices) if devices else torch.futures.Future()
                if one.is_done:
                    one.future.set_result(one.outputs)
                else:
                    self._wake.release()
            return one.future

    def _finish_futures(self) -> None:
        """A thread: somebody has to wait for them."""
        while True:
            self._wake.acquire()
            while (
                one := next((each for each in list(self.queue) if each.future is not None), None)
            ) is not None:
                try:
                    self.wait_for(one)
                except RuntimeError as error:
                    if one.future is not None:
                        one.future.set_exception(error)
                    break

    def reissue(self) -> None:
        """Under the lock, once the group is whole again: in their order, what nobody has finished."""
        with torch.no_grad():
            for one in list(self.queue):
                if self._answer(one) is not None:
                    if self.queue[0] is one:
                        self._commit(one)
                else:
                    self._issue(one)

    # -------------------------------------------------------------- what torch calls, by old and new names

    def getBackendName(self) -> str:
        return next(iter(self.kinds.values()))

    def getRank(self) -> int:
        return self.own

    def getSize(self) -> int:
        return len(self.members)

    rank, size = getRank, getSize

    def abort(self) -> None:
        """Peers may still need answers: the process's end is the group's."""

    def shutdown(self) -> None:
        """As above."""

    def allreduce(self, tensors: Any, opts: Any = None) -> HeldWork:
        options = _own(opts if isinstance(opts, c10d.AllreduceOptions) else _reduce_options(opts))
        about = f" {_op(options)}"
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return self.run(
            "allreduce", tensors, lambda i, o: i.allreduce(o, options), about=about, is_in_place=True
        )

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> HeldWork:
        options = opts or c10d.AllreduceCoalescedOptions()
        return self.run(
            "allreduce",
            list(tensors),
            lambda i, o: i.allreduce_coalesced(o, options),
            about=f" {_op(options)}",
            is_in_place=True,
        )

    def broadcast(self, tensors: Any, opts: Any = None) -> HeldWork:
        options = _own(opts or c10d.BroadcastOptions())
        about = f" from {options.rootRank}"
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return self.run(
            "broadcast", tensors, lambda i, o: i.broadcast(o, options), about=about, is_in_place=True
        )

    def barrier(self, opts: Any = None) -> HeldWork:
        options = opts or c10d.BarrierOptions()
        if "nccl" in self.kinds.values() and options.device is None:
            options.device = self._device()
        return self.run("barrier", [], lambda i, o: i.barrier(options))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> HeldWork:
        options, width = _own(opts or c10d.AllgatherOptions()), len(outputs[0])
        flat = [each for row in outputs for each in row]

        def issue(inner: Any, given: Tensors) -> Any:
            return inner.allgather(
                [given[at : at + width] for at in range(0, len(given), width)], inputs, options
            )

        return self.run("allgather", flat, issue)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> HeldWork:
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> HeldWork:
        def issue(inner: Any, rooms: Tensors) -> Any:
            options = [_own(c10d.AllgatherOptions()) for _ in rooms]
            return _Several(
                [inner._allgather_base(o, i, p) for o, i, p in zip(rooms, inputs, options, strict=True)]
            )

        return self.run("allgather", list(outputs), issue)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> HeldWork:
        options = _own(opts or c10d.ReduceScatterOptions())
        about = f" {_op(options)}"
        return self.run(
            "reduce_scatter", list(outputs), lambda i, o: i.reduce_scatter(o, inputs, options), about=about
        )

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> HeldWork:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> HeldWork:
        options = _own(opts or c10d.ReduceScatterOptions())

        def issue(inner: Any, rooms: Tensors) -> Any:
            return _Several(
                [inner._reduce_scatter_base(o, i, options) for o, i in zip(rooms, inputs, strict=True)]
            )

        return self.run("reduce_scatter", list(outputs), issue, about=f" {_op(options)}")

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce(self, tensors: Any, opts: Any = None) -> HeldWork:
        options = opts or c10d.ReduceOptions()
        about = f" {_op(options)} to {options.rootRank}"
        return self.run(
            "reduce", list(tensors), lambda i, o: i.reduce(o, options), about=about, is_in_place=True
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> HeldWork:
        options = opts or c10d.GatherOptions()
        flat, about = [each for row in outputs for each in row], f" to {options.rootRank}"

        def issue(inner: Any, rooms: Tensors) -> Any:
            return inner.gather([rooms] if rooms else [], inputs, options)

        return self.run("gather", flat, issue, about=about)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> HeldWork:
        options = opts or c10d.ScatterOptions()
        about = f" from {options.rootRank}"
        return self.run("scatter", list(outputs), lambda i, o: i.scatter(o, inputs, options), about=about)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> HeldWork:
        options = opts or c10d.AllToAllOptions()
        return self.run("alltoall", list(outputs), lambda i, o: i.alltoall(o, inputs, options))

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, out_sizes: Any, in_sizes: Any, opts: Any = None
    ) -> HeldWork:
        options = opts or c10d.AllToAllOptions()

        def issue(inner: Any, rooms: Tensors) -> Any:
            return inner.alltoall_base(rooms[0], given, out_sizes, in_sizes, options)

        return self.run("alltoall", [output], issue)

    all_to_all_single = alltoall_base

    # Messages from rank to rank have no position that others know. They work, and nothing is held from then
    # on.

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        return self._passed_on("send", tensors).send(list(tensors), to, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return self._passed_on("recv", tensors).recv(list(tensors), source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._passed_on("recv", tensors).recv_anysource(list(tensors), tag)

    def _passed_on(self, kind: str, tensors: Any) -> Any:
        if self.spans_units:
            self.held.refuse(f"it uses {kind}, a message from rank to rank, which cannot be answered again")
        return self.inner[tensors[0].device.type]


class _Several:
    """Works of one collective."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, *timeout: timedelta) -> None:
        for each in self._works:
            each.wait(*timeout)

    def is_completed(self) -> bool:
        return all(each.is_completed() for each in self._works)


def _own(options: Any) -> Any:
    """In NCCL's own stream, whatever the caller wanted: the host waits for it here."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options


def _reduce_options(op: Any) -> Any:
    options = c10d.AllreduceOptions()
    if op is not None:
        options.reduceOp = op
    return options


def _op(options: Any) -> str:
    return str(options.reduceOp.op.name).lower()


# Dynamo must not look into what C++ calls while a compiled module runs.
for _name in (
    *("allreduce", "allreduce_coalesced", "broadcast", "barrier", "allgather", "all_gather_single", "reduce"),
    *("_allgather_base", "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter"),
    *(
        "reduce_scatter_single",
        "_reduce_scatter_base",
        "reduce_scatter_single_coalesced",
        "gather",
        "scatter",
    ),
    *("reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
):
    setattr(HeldGroup, _name, torch._disable_dynamo(getattr(HeldGroup, _name)))
HeldWork.wait = torch._disable_dynamo(HeldWork.wait)
HeldWork.get_future = torch._disable_dynamo(HeldWork.get_future)
