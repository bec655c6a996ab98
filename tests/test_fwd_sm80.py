"""The sm80 forward kernel without a GPU: what it compiles to, and that its layouts hold what they promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from cuteflash.problem import FwdProblem, Storage
from cuteflash.traits.sm80 import FwdTraitsSm80

cutlass = pytest.importorskip("cutlass")
from cutlass import cute  # noqa: E402

from cuteflash.atoms import row_copies  # noqa: E402
from cuteflash.core.views import transposed  # noqa: E402
from cuteflash.kernels.sm80.fwd import FlashFwdSm80  # noqa: E402
from tests.cross_compile import Compiled  # noqa: E402
from tests.kernel_store import KernelStore  # noqa: E402
from tests.slow import slow_but  # noqa: E402

BANKS, BANK_BYTES, PHASE_ROWS = 32, 4, 8
WIDE = FwdTraitsSm80(128, 64, 128, 128, num_warps=8)

CASES = {
    "full": (WIDE, FwdProblem.dense("bf16", 128, 128)),
    "causal-lse": (WIDE, FwdProblem.dense("fp16", 128, 128, "causal", lse=True)),
    "window-softcap": (FwdTraitsSm80(64, 64, 64, 64), FwdProblem.dense("bf16", 64, 64, "window", softcap=True)),
    "packed": (FwdTraitsSm80(64, 64, 64, 64), FwdProblem.dense("bf16", 64, 64, "causal", lse=True, packed_heads=6)),
    "varlen": (
        FwdTraitsSm80(64, 64, 64, 64),
        dataclasses.replace(
            FwdProblem.dense("bf16", 64, 64, "causal", lse=True, packed_heads=6),
            storage=Storage("varlen", "varlen", used_q=True, used_k=True),
        ),
    ),
    "padded": (FwdTraitsSm80(64, 64, 96, 32), FwdProblem.dense("bf16", 72, 24, lse=True)),
    "stages": (FwdTraitsSm80(64, 32, 64, 64, kv_stage=3, q_in_regs=True), FwdProblem.dense("bf16", 64, 64, "causal")),
}


@pytest.fixture(scope="session")
def ampere(kernels: KernelStore) -> Callable[[str], Compiled]:
    """A case compiled for sm_80."""
    return lambda case: kernels(FlashFwdSm80, *CASES[case], "sm_80")


@pytest.mark.parametrize("case", slow_but(CASES, "full"))
def test_case_uses_ampere_instructions_and_does_not_spill(ampere: Callable[[str], Compiled], case: str) -> None:
    compiled = ampere(case)
    for instruction in (
        "LDGSTS.E.BYPASS",  # cp.async past L1
        "LDSM.16.M88.4",  # ldmatrix of Q and K
        "LDSM.16.MT88.4",  # transposing ldmatrix of V
        "HMMA.16816.F32",
        "F2FP",  # two fp32 rounded at once
        r"STG\.E\.128",
    ):
        assert compiled.count(instruction), instruction
    compiled.assert_clean()
    assert not compiled.times(r"wgmma|cp\.async\.bulk")


def test_exponentials_take_one_fused_multiply_add_each(ampere: Callable[[str], Compiled]) -> None:
    compiled = ampere("full")
    exponentials = compiled.count(r"MUFU\.EX2")
    assert compiled.count(r"FFMA\b") >= exponentials > 0
    # Two ex2 instructions' worth of multiplications would show up as FMUL beside the rescaling of O (two loop bodies).
    traits, _ = CASES["full"]
    rescaled = traits.tile_m * traits.head_dim_v // traits.num_threads
    assert compiled.count(r"FMUL\b") < 3 * rescaled + exponentials // 2


ABLATED = {
    "async_copy": dataclasses.replace(WIDE, async_copy=False),
    "swizzle_bits": dataclasses.replace(WIDE, swizzle_bits=0),
    "eager_loads": dataclasses.replace(WIDE, eager_loads=False),
    "double_buffer": dataclasses.replace(WIDE, double_buffer=False),
    "fused_softmax": dataclasses.replace(WIDE, fused_softmax=False),
    "longest_first": dataclasses.replace(WIDE, longest_first=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("trait", ABLATED)
def test_an_optimisation_switched_off_leaves_a_kernel_without_it(
    ampere: Callable[[str], Compiled], kernels: KernelStore, trait: str
) -> None:
    whole = ampere("causal-lse")
    without = kernels(FlashFwdSm80, ABLATED[trait], CASES["causal-lse"][1], "sm_80")
    without.assert_clean()
    assert bool(without.count("LDGSTS")) == (trait != "async_copy")
    if trait == "fused_softmax":  # a score is scaled and its exponent multiplied by themselves; more shuffles
        assert without.count(r"FMUL\b") > whole.count(r"FMUL\b") + whole.count(r"MUFU\.EX2")
        assert without.count("SHFL") > whole.count("SHFL")
    assert without.ptx != whole.ptx  # in machine code ptxas fetches fragments early anyway


def test_rows_beyond_the_keys_are_filled_with_zeros(ampere: Callable[[str], Compiled]) -> None:
    copy = r"cp\.async\.cg\.shared\.global \S+ \S+ 16, "
    assert ampere("full").times(copy + "%r")  # a source size of 0 writes zeros
    assert ampere("full").times(copy + "16;")  # all blocks but the last copy without a predicate


def test_strides_of_batch_head_and_sequence_are_multiplied_in_64_bits(ampere: Callable[[str], Compiled]) -> None:
    assert len(ampere("full").found(r"ld\.param\.b64 \t?(%rd\d+)")) >= 12  # three of each of Q, K, V and O
    assert ampere("full").times(r"m(?:ul|ad)\.lo\.s64")


def on_host(probe: Any) -> None:
    """Run `probe` where layouts can be made and evaluated."""
    cute.jit(preprocess=False)(probe)()


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_an_ldmatrix_phase_touches_every_bank_once(head_dim: int) -> None:
    def probe() -> None:
        tile = FlashFwdSm80(FwdTraitsSm80(64, 64, head_dim, head_dim), FwdProblem.dense("bf16", 16, 16)).smem_layout_q()
        for column in range(0, head_dim, 8):
            chunks = [tile((row, column)) * 2 // (4 * BANK_BYTES) for row in range(PHASE_ROWS)]
            assert len({chunk % (BANKS // 4) for chunk in chunks}) == PHASE_ROWS

    on_host(probe)


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 96, 256])
def test_shared_memory_tiles_are_one_to_one_and_chunks_stay_whole(head_dim: int) -> None:
    def probe() -> None:
        tile = FlashFwdSm80(FwdTraitsSm80(64, 64, head_dim, head_dim), FwdProblem.dense("bf16", 16, 16)).smem_layout_q()
        places = set()
        for row in range(64):
            for column in range(0, head_dim, 8):
                start = tile((row, column))
                assert start % 8 == 0 and tile((row, column + 7)) == start + 7
                places.add(start)
        assert places == set(range(0, 64 * head_dim, 8))

    on_host(probe)


def test_transposed_v_is_the_same_memory() -> None:
    def probe() -> None:
        traits = FwdTraitsSm80(64, 64, 96, 96, kv_stage=2)
        layout = FlashFwdSm80(traits, FwdProblem.dense("bf16", 96, 96)).smem_layout_v()
        pointer = cute.make_ptr(cutlass.BFloat16, 0, cute.AddressSpace.smem, assumed_align=1024)
        flipped = transposed(cute.make_tensor(pointer, layout)).layout
        for key, column, stage in ((0, 0, 0), (5, 17, 1), (63, 95, 0), (33, 40, 1)):
            assert flipped((column, key, stage)) == layout((key, column, stage))

    on_host(probe)


@pytest.mark.parametrize("cols", [16, 32, 64, 96, 128])
def test_a_pass_of_the_copy_covers_whole_rows_of_a_slab_once(cols: int) -> None:
    traits = FwdTraitsSm80(128, 64, cols, cols)

    def probe() -> None:
        copy = row_copies.load_copy(cutlass.BFloat16, traits.num_threads, cols)
        rows = cute.size(copy.tiler_mn[0])
        slab = cute.size(copy.tiler_mn[1])
        assert rows == traits.copy_rows(cols) and cols % slab == 0
        places = {copy.layout_tv_tiled((thread, v)) for thread in range(traits.num_threads) for v in range(8)}
        assert places == set(range(rows * slab))

    on_host(probe)
