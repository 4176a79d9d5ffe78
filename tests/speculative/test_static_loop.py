"""The static loop: the host loop's results, bit equality, and no look at a tensor."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from helpers import random_drafter, random_target
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative import graphs, static_run
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.generation import new_row
from dflash_lab.speculative.graphs import CycleReport, EagerCycles
from dflash_lab.speculative.ngram import NGramLookup
from dflash_lab.speculative.proposer import DFlash, Plain
from dflash_lab.speculative.sampling import Sampling
from dflash_lab.speculative.static_loop import StaticLoop
from dflash_lab.target import packed
from dflash_lab.target.fused import FusedTarget, as_target
from dflash_lab.target.packed import PackedLinear

STYLES = [
    Sampling(),
    Sampling(0.3, seed=1),
    Sampling(0.7, top_p=0.9, seed=2),
    Sampling(1.0, top_k=20, seed=3),
    Sampling(1.5, seed=4),
]


@pytest.fixture(scope="module")
def trained(conformance_target, conformance_drafter):
    """A pair whose drafts are sometimes right: fused target, trained drafter."""
    return as_target(conformance_target.model), conformance_drafter


def chain_prompts(count, longest=12, seed=0):
    """Prompts as the trained pair knows them."""
    noise = random.Random(seed)
    return [
        [noise.choice((100, 101, 102))]
        + [noise.randrange(97) for _ in range(noise.randrange(1, longest))]
        for _ in range(count)
    ]


def same(one, two) -> None:
    """Outputs, reasons and every cycle agree."""
    assert one.output_ids == two.output_ids
    assert one.stop_reasons == two.stop_reasons
    for name in ("start", "acceptance_length", "draft_tokens", "target_tokens"):
        rows = [
            [(c.prompt, c.cycle, getattr(c, name)) for c in result.trace.cycles]
            for result in (one, two)
        ]
        assert sorted(rows[0]) == sorted(rows[1]), name


# --- the same as the host loop --------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("style", range(len(STYLES)))
@pytest.mark.parametrize("batch", [1, 5])
def test_it_equals_the_host_loop_cycle_by_cycle(trained, style, batch):
    target, drafter = trained
    sampling = STYLES[style]
    prompts = chain_prompts(40 if batch > 1 else 12, seed=style)
    lengths = set()
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        options = {
            "max_new_tokens": 30,
            "sampling": sampling,
            "seeds": [start + i for i in range(len(part))],
            "stop_token_ids": (7, 50),
        }
        results = [
            speculative_generate(target, DFlash(drafter), part, loop=loop, **options)
            for loop in ("static", "host")
        ]
        same(*results)
        assert results[0].trace.header["loop"] == "static"
        plain = speculative_generate(target, Plain(), part, **options)
        assert plain.output_ids == results[0].output_ids
        assert plain.trace.header["loop"] == "static"
        lengths |= {c.acceptance_length for c in results[0].trace.cycles}
        for row, output in enumerate(results[0].output_ids):
            added = results[0].trace.acceptance_lengths[row]
            assert 1 + sum(added) == len(output)  # the first token is the prefill's
    if batch > 1 and sampling.greedy:
        assert lengths == set(range(1, 9))
    assert len(lengths) > 2


@pytest.mark.parametrize("fused", [True, False])
def test_unfused_models_and_input_fusion_run_in_it_too(conformance_target, fused):
    target = random_target(0)
    target = target if fused else conformance_target
    drafter = random_drafter(target, conditioning="input")
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    results = [
        speculative_generate(
            target, DFlash(drafter), prompts, max_new_tokens=20, loop=loop
        )
        for loop in ("static", "host")
    ]
    same(*results)


def test_windows_and_causal_blocks(target):
    overrides = {
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 5,
    }
    drafter = random_drafter(target, **overrides)
    windowed = random_target(
        2, use_sliding_window=True, sliding_window=6, max_window_layers=2
    )
    assert isinstance(windowed, FusedTarget) and len(windowed._windows) == 2
    for one in (target, windowed):
        results = [
            speculative_generate(
                one, DFlash(drafter), [[1, 2, 3], [9]], max_new_tokens=24, loop=loop
            )
            for loop in ("static", "host")
        ]
        same(*results)


def test_a_last_block_beyond_the_span_of_reading(trained):
    """Texts cross the borders at which passes begin to read more positions."""
    target, drafter = trained
    prompts = chain_prompts(3, seed=9)
    long = [prompt * 12 for prompt in prompts]
    for part in (long, long[:1]):
        results = [
            speculative_generate(
                target, DFlash(drafter), part, max_new_tokens=80, loop=loop
            )
            for loop in ("static", "host")
        ]
        same(*results)


def test_what_it_cannot_do_is_refused_and_left_to_the_host_loop(target, drafter):
    options = {"max_new_tokens": 4}
    for proposer, changes in (
        (NGramLookup(4), {}),
        (DFlash(drafter), {"sampling": Sampling(1.0, rule="speculative")}),
        (DFlash(drafter), {"details": True}),
    ):
        result = speculative_generate(target, proposer, [1, 2], **options, **changes)
        assert result.trace.header["loop"] == "host"
        for asked in ({"loop": "static"}, {"strict": True}):
            with pytest.raises(DFlashLabError, match="loop='host'"):
                speculative_generate(
                    target, proposer, [1, 2], **options, **changes, **asked
                )
    with pytest.raises(DFlashLabError, match="choose auto, host or static"):
        speculative_generate(target, Plain(), [1, 2], loop="graph")
    with pytest.raises(DFlashLabError, match="kernel_rows 0"):
        Plain(0)


# --- stopping, freezing, streaming ----------------------------------------------------


@pytest.mark.parametrize("budget", range(1, 12))
def test_every_length_limit_inside_a_block(trained, budget):
    target, drafter = trained
    prompts = chain_prompts(4, seed=budget)
    result = speculative_generate(
        target, DFlash(drafter), prompts, max_new_tokens=budget
    )
    plain = speculative_generate(target, Plain(), prompts, max_new_tokens=budget)
    assert result.output_ids == plain.output_ids
    assert [len(output) for output in result.output_ids] == [budget] * 4
    assert result.stop_reasons == ["length"] * 4


@pytest.mark.slow
def test_a_stop_token_at_every_offset_of_a_block(trained):
    target, drafter = trained
    offsets = set()
    for prompt in chain_prompts(6, seed=3):
        whole = speculative_generate(target, DFlash(drafter), prompt, max_new_tokens=30)
        output = whole.output_ids[0]
        for stop in set(output):
            result = speculative_generate(
                target,
                DFlash(drafter),
                prompt,
                max_new_tokens=30,
                stop_token_ids=[stop],
            )
            assert result.output_ids == [output[: output.index(stop) + 1]]
            assert result.stop_reasons == ["stop_token"]
            if result.trace.cycles:
                last = result.trace.cycles[-1]
                offsets.add((last.acceptance_length, sum(last.accepted)))
    # Ends at every place of a block, with and without accepted drafts behind it.
    assert {length for length, _ in offsets} == set(range(1, 9))


@torch.inference_mode()
def test_rows_that_are_done_stay_as_they_are(trained):
    target, drafter = trained
    prompts = chain_prompts(4, seed=5)
    loop = make_loop(target, drafter, prompts, budget=6)
    finished = {}
    for _ in range(12):
        loop.set_span(40)
        loop.cycle()
        for row in range(4):
            if loop.done[row]:
                length = int(loop.anchor[row]) + 1
                text = loop.text[row, :length].tolist()
                assert finished.setdefault(row, (length, text)) == (length, text)
                assert length == len(prompts[row]) + 6
    assert len(finished) == 4
    assert loop.report[:, static_run.KEPT].tolist() == [0] * 4


def test_streaming_gives_exactly_the_output(trained):
    target, drafter = trained
    prompts = chain_prompts(3, seed=1)
    heard: list[list[int]] = [[], [], []]
    result = speculative_generate(
        target,
        DFlash(drafter),
        prompts,
        max_new_tokens=20,
        on_tokens=lambda row, ids: heard[row].extend(ids),
    )
    assert heard == result.output_ids
    assert result.trace.header["loop"] == "static"


class LateCycles(EagerCycles):
    """Reports arrive one cycle late, as from a GPU."""

    lag = 1

    def __init__(self, loop):
        super().__init__(loop)
        self.waiting: CycleReport | None = None
        self.started = 0

    def step(self, span):
        report, self.waiting = self.waiting, super().step(span)
        self.started += 1
        LateCycles.last = self
        return report


@pytest.mark.parametrize("stops", [(), (7, 50)])
def test_reading_late_changes_nothing_and_wastes_one_cycle(trained, monkeypatch, stops):
    target, drafter = trained
    for prompts in (chain_prompts(1, seed=2), chain_prompts(4, seed=2)):
        options = {"max_new_tokens": 25, "stop_token_ids": stops}
        early = speculative_generate(target, DFlash(drafter), prompts, **options)
        with monkeypatch.context() as patch:
            patch.setattr(static_run, "make_cycles", lambda loop, _: LateCycles(loop))
            late = speculative_generate(target, DFlash(drafter), prompts, **options)
        same(early, late)
        most = max(len(lengths) for lengths in early.trace.acceptance_lengths)
        assert LateCycles.last.started == most + 1


def test_an_interrupt_returns_what_was_made(trained, monkeypatch):
    target, drafter = trained
    prompt = chain_prompts(1)[0]
    whole = speculative_generate(target, DFlash(drafter), prompt, max_new_tokens=30)
    step, calls = EagerCycles.step, []

    def interrupted(self, span):
        calls.append(span)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(self, span)

    monkeypatch.setattr(EagerCycles, "step", interrupted)
    result = speculative_generate(target, DFlash(drafter), prompt, max_new_tokens=30)
    assert result.stop_reasons == ["interrupted"] and len(result.trace.cycles) == 2
    output = result.output_ids[0]
    assert output and output == whole.output_ids[0][: len(output)]


# --- adversarial drafts ---------------------------------------------------------------


def make_loop(target, drafter, prompts, budget, sampling=None, strict=False, rows=8):
    """A loop that is filled with prompts and ready for its first cycle."""
    proposer = Plain(rows) if drafter is None else DFlash(drafter)
    made = [new_row(i, prompt, budget, target) for i, prompt in enumerate(prompts)]
    sampling = sampling or Sampling()
    tap = target.tap(proposer.target_layer_ids)
    loop = StaticLoop(
        target,
        proposer,
        made,
        sampling,
        [0] * len(prompts),
        (),
        tap,
        None if strict else 64,
    )
    with torch.inference_mode():
        for place, row in enumerate(made):
            loop.prefill(place, row, loop.block_size if strict else None)
    return loop


@pytest.mark.parametrize("right", [*range(8), "random", "repeats", "mask"])
@torch.inference_mode()
def test_caches_hold_what_a_fresh_pass_gives(trained, right):
    """Drafts that are right so far and then wrong: any text, any caches, exact."""
    target, drafter = trained
    prompts = chain_prompts(3, seed=4)
    expected = speculative_generate(target, Plain(), prompts, max_new_tokens=40)
    texts = [p + o for p, o in zip(prompts, expected.output_ids, strict=True)]
    noise = random.Random(0)

    class Scripted(StaticLoop):
        def draft(self):
            rows = []
            for row, text in enumerate(texts):
                at = int(self.anchor[row]) + 1
                truth = (text[at : at + 7] + [0] * 7)[:7]
                if right == "random":
                    rows.append([noise.randrange(97) for _ in range(7)])
                elif right == "repeats":
                    rows.append([text[at - 1]] * 7)
                elif right == "mask":
                    rows.append([127] * 7)
                else:
                    wrong = [(token + 1) % 97 for token in truth]
                    rows.append(truth[:right] + wrong[right:])
            return torch.tensor(rows), torch.zeros_like(self.done)

    loop = make_loop(target, drafter, prompts, budget=40)
    loop.__class__ = Scripted
    for _ in range(3):
        loop.set_span(int(loop.anchor.max()))
        loop.cycle()
        kept = loop.report[:, static_run.KEPT].tolist()
        if isinstance(right, int):
            assert kept == [right + 1] * 3
    for row, text in enumerate(texts):
        length = int(loop.anchor[row])
        assert loop.text[row, : length + 1].tolist() == text[: length + 1]
        # Everything before the anchor, against one pass over the text alone.
        ids, positions = torch.tensor([text[:length]]), torch.arange(length)[None]
        fresh = target.new_cache(1, length)
        loop.tap.take() if loop.tap._states else None
        target.forward(ids, positions, fresh)
        session = DFlash(drafter).start(target, 1, length)
        session.observe(loop.tap.take(), positions, torch.tensor([0]))
        for cache, new in ((loop.cache, fresh), (loop.session.cache, session.cache)):
            for layer in new._keys:
                pair = cache.read(layer, length, torch.tensor([row]))
                for found, wanted in zip(pair, new.read(layer, length), strict=True):
                    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


# --- strict: bit for bit --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_strict_output_is_bit_equal_to_plain_decoding_in_the_same_shape(trained, dtype):
    """Text, and every committed key and value of the target, torch.equal."""
    model = copy.deepcopy(trained[0].model).to(dtype)
    target = as_target(model)
    drafter = copy.deepcopy(trained[1]).to(dtype)
    cycles = [0, 0]
    for seed in range(6):
        prompts = chain_prompts(2, longest=30, seed=seed)
        sampling = STYLES[seed % len(STYLES)]
        loops = [
            make_loop(target, d, prompts, 40, sampling, strict=True)
            for d in (drafter, None)
        ]
        for number, loop in enumerate(loops):
            loop.set_span(0)
            while not loop.done.all():
                loop.cycle()
                cycles[number] += 1
            loop.tap.close()
        one, two = loops
        assert one.capacity == two.capacity
        for row in range(2):
            length = int(one.anchor[row])
            assert torch.equal(one.text[row, : length + 1], two.text[row, : length + 1])
            for layer in range(target.num_layers):
                for a, b in zip(
                    one.cache.read(layer, length),
                    two.cache.read(layer, length),
                    strict=True,
                ):
                    assert torch.equal(a[row], b[row])
    assert cycles[0] < 0.8 * cycles[1]  # drafts were used


def test_strict_generation_through_the_door(trained):
    target, drafter = trained
    prompts = chain_prompts(4, seed=8)
    options = {"max_new_tokens": 30, "strict": True, "stop_token_ids": (7,)}
    drafted = speculative_generate(target, DFlash(drafter), prompts, **options)
    plain = speculative_generate(target, Plain(8), prompts, **options)
    assert drafted.output_ids == plain.output_ids
    assert drafted.trace.header["strict"] and drafted.tau > 1.5
    assert plain.tau == 1.0


# --- no look at a tensor, no new address ----------------------------------------------

FORBIDDEN = (
    "_local_scalar_dense",
    "aten.item",
    "nonzero",
    "masked_select",
    "multinomial",
    "unique",
    "is_nonzero",
    "equal.default",
    "where.Scalar",
)


class NoLooks(TorchDispatchMode):
    """Refuses every operator for which a device waits, whose shape depends on data, or
    that reads from another device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        assert not any(word in name for word in FORBIDDEN), name
        out = func(*args, **(kwargs or {}))
        devices = {t.device.type for t in (*args, out) if torch.is_tensor(t)}
        assert devices <= {"meta"}, f"{name} on {devices}"
        return out


def meta_loop(sampling=None):
    """A loop whose tensors have shapes and no values."""
    model = copy.deepcopy(random_target(0).model).to("meta")
    target = as_target(model)
    drafter = random_drafter(random_target(0)).to("meta")
    proposer = DFlash(drafter)
    rows = [new_row(i, [1, 2, 3], 20, target) for i in range(2)]
    tap = target.tap(proposer.target_layer_ids)
    loop = StaticLoop(
        target, proposer, rows, sampling or Sampling(), [0, 0], (5,), tap, 64
    )
    loop.set_span(3)
    loop.verify(loop.masks)  # as a prefill: tables and buffers are made on first use
    loop.observe()
    return loop


@pytest.mark.parametrize("style", range(len(STYLES)))
@torch.inference_mode()
def test_a_cycle_looks_at_no_tensor(style):
    loop = meta_loop(STYLES[style])
    loop.cycle()
    with NoLooks():
        loop.cycle()


@pytest.mark.parametrize(
    "look",
    [
        lambda loop: loop.anchor.max().item(),
        lambda loop: bool(loop.done.all()),
        lambda loop: loop.done.nonzero(),
        lambda loop: torch.zeros(2).to("meta"),
        lambda loop: torch.where(loop.done, 0, loop.anchor),
    ],
)
@torch.inference_mode()
def test_a_look_put_back_is_noticed(look):
    class Looking(StaticLoop):
        def observe(self):
            look(self)
            super().observe()

    loop = meta_loop()
    loop.cycle()
    loop.__class__ = Looking
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), NoLooks():
        loop.cycle()


@pytest.mark.slow
@pytest.mark.parametrize("style", [0, 2])
def test_a_cycle_is_one_graph_and_is_compiled_once(trained, style):
    target, drafter = trained
    loop = make_loop(target, drafter, chain_prompts(2), 30, STYLES[style])
    twin = make_loop(target, drafter, chain_prompts(2), 30, STYLES[style])
    torch._dynamo.reset()
    compiled = torch.compile(
        StaticLoop.cycle, fullgraph=True, backend="eager", dynamic=False
    )
    with torch.inference_mode():
        for step in range(4):
            for one in (loop, twin):
                one.set_span(40)
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                compiled(loop)
            twin.cycle()
            assert torch.equal(loop.report, twin.report)
    torch._dynamo.reset()


@torch.inference_mode()
def test_no_address_changes(trained):
    target, drafter = trained
    loop = make_loop(target, drafter, chain_prompts(2), 30)
    loop.set_span(40)
    loop.cycle()

    def addresses():
        tensors = list(loop.state().values())
        for cache in (loop.cache, loop.session.cache):
            tensors += [*cache._keys.values(), *cache._values.values()]
        return [tensor.data_ptr() for tensor in tensors]

    before = addresses()
    assert len(before) == 4 + 2 * (target.num_layers + 2)
    for _ in range(3):
        loop.cycle()
        assert addresses() == before


@torch.inference_mode()
def test_a_fresh_capture_can_be_taken_back(trained):
    """What a capture does before it records: run ahead, restore, and go on."""
    target, drafter = trained
    loop = make_loop(target, drafter, chain_prompts(2), 30)
    twin = make_loop(target, drafter, chain_prompts(2), 30)
    for one in (loop, twin):
        one.set_span(40)
    before = {name: tensor.clone() for name, tensor in loop.state().items()}
    for _ in range(3):
        loop.cycle()
    for name, tensor in before.items():
        getattr(loop, name).copy_(tensor)
    for _ in range(6):
        loop.cycle()
        twin.cycle()
        assert torch.equal(loop.report, twin.report)
    assert torch.equal(loop.anchor, twin.anchor)


# --- compiled -------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_cycles_give_the_same(trained, monkeypatch):
    """Through the compiler's first two stages; the last makes machine code of them."""
    target, drafter = trained
    compiled = torch.compile(
        StaticLoop.cycle, fullgraph=True, backend="aot_eager", dynamic=False
    )
    monkeypatch.setattr(graphs, "_compiled_cycle", lambda: compiled)
    torch._dynamo.reset()
    for number, prompt in enumerate(chain_prompts(3, seed=6)):
        options = {"max_new_tokens": 20, "stop_token_ids": (7,)}
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            fast = speculative_generate(
                target, DFlash(drafter), prompt, compile=True, **options
            )
        same(fast, speculative_generate(target, DFlash(drafter), prompt, **options))
    torch._dynamo.reset()


@pytest.mark.slow
def test_many_capacities_are_compiled_one_after_the_other(trained, monkeypatch):
    """More shapes than the compiler's own limit for one function."""
    target, drafter = trained
    compiled = torch.compile(
        StaticLoop.cycle, fullgraph=True, backend="eager", dynamic=False
    )
    monkeypatch.setattr(graphs, "_compiled_cycle", lambda: compiled)
    monkeypatch.setattr(static_run, "COMPILED", 16)
    torch._dynamo.reset()
    prompt = chain_prompts(1)[0]
    for budget in range(16, 16 * 12, 16):
        ours = [
            speculative_generate(
                target, DFlash(drafter), prompt, max_new_tokens=budget, compile=compile
            ).output_ids
            for compile in (True, False)
        ]
        assert ours[0] == ours[1]
    torch._dynamo.reset()


@pytest.mark.parametrize("loop", ["static", "host"])
def test_nan_is_refused_even_for_a_single_token(loop):
    model = random_target(4).model
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(DFlashLabError, match="target's logits contain NaN"):
        speculative_generate(
            as_target(model), Plain(), [1, 2], max_new_tokens=1, loop=loop
        )


def test_a_packed_product_compiles(monkeypatch):
    monkeypatch.setattr(packed, "SMALL_WEIGHT", 1)
    noise = torch.Generator().manual_seed(0)
    product = PackedLinear(
        [torch.randn(8, 16, generator=noise)] * 2, [torch.ones(8)] * 2
    )
    x = torch.randn(1, 5, 16, generator=noise)
    compiled = torch.compile(product.__call__, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), product(x))
    assert compiled(x).shape == (1, 5, 16)


def test_compiling_without_a_compiler_or_off_the_static_loop_is_refused(
    target, drafter, monkeypatch
):
    with pytest.raises(DFlashLabError, match="loop='host'"):
        speculative_generate(target, NGramLookup(4), [1, 2], compile=True)
    monkeypatch.setattr(graphs.shutil, "which", lambda name: None)
    with pytest.raises(DFlashLabError, match=r"C\+\+ compiler"):
        speculative_generate(target, DFlash(drafter), [1, 2], compile=True)
