"""The bank-conflict benchmark without a GPU: machine code of its kernels, their addresses, expectations, verdicts."""

from __future__ import annotations

import collections
import contextlib
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import bank_conflicts, bank_counters
from benchmarks.bank_patterns import (
    INSTRUCTION_SET,
    INSTRUCTIONS,
    LANES,
    POISON,
    Case,
    addresses,
    fragments,
    lane_coordinates,
    tile_image,
    ways,
)

cutlass = pytest.importorskip("cutlass")
from cutlass._mlir import ir  # noqa: E402
from cutlass.cutlass_dsl import CuTeDSL  # noqa: E402

from benchmarks.bank_kernels import MAX_WARPS, BankProbe  # noqa: E402
from tests.cross_compile import Compiled  # noqa: E402
from tests.kernel_store import KernelStore  # noqa: E402

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)([^;]*);")
LABEL = re.compile(r"^(\.L_x_\d+):\n(?=(?:\.L_x_\d+:\n)*\s+/\*([0-9a-f]{4,})\*/)", re.MULTILINE)
MEMORY = re.compile(r"LDS|LDG(?!DEPBAR)|LDL|LD\.|ST|ATOM|RED|BAR")
NEVER = "!PT"  # ptxas puts some `@!PT LDS RZ, [RZ]` before cp.async


def count_ways(byte_addresses: Any, lane_bytes: int, copies: bool) -> Any:
    """The model, counted by hand: most distinct words of one bank, or lines of a copy, for each phase of 128 bytes."""
    lanes = min(32, 128 // lane_bytes)
    found = []
    for first in range(0, 32, lanes):
        if copies:
            found.append(len({int(address) // 128 for address in byte_addresses[first : first + lanes]}))
            continue
        words: dict[int, set[int]] = collections.defaultdict(set)
        for address in byte_addresses[first : first + lanes]:
            for word in range(int(address) // 4, (int(address) + lane_bytes) // 4):
                words[word % 32].add(word)
        found.append(max(map(len, words.values())))
    return np.array(found)


@contextlib.contextmanager
def layouts_on_the_host() -> Iterator[None]:
    """CuTe layouts can be evaluated inside, without a kernel."""
    settings = CuTeDSL._get_dsl().envar
    before, settings.arch = settings._arch, "sm_90a"
    try:
        with ir.Context(), ir.Location.unknown(), ir.InsertionPoint(ir.Module.create().body):
            yield
    finally:
        settings.arch = before


@pytest.fixture(scope="session")
def hopper(kernels: KernelStore) -> Callable[[str], Compiled]:
    """An instruction's kernel compiled for sm_90a."""

    def compile_case(name: str) -> Compiled:
        case = Case(name, 3)
        return kernels(BankProbe, case, case.what, "sm_90a")

    return compile_case


def timed_region(sass: str) -> list[tuple[int, str, str, str]]:
    """(address, predicate, name, operands) of what stands between the two reads of the cycle counter.

    Labels among the operands are replaced by the addresses that they stand for.
    """
    places = dict(LABEL.findall(sass))
    sass = re.sub(r"`\((\.L_x_\d+)\)", lambda label: places[label[1]], sass)
    code = [(int(at, 16), predicate, name, rest) for at, predicate, name, rest in LINE.findall(sass)]
    start, end = (index for index, line in enumerate(code) if "SR_CLOCKLO" in line[3])
    return code[start + 1 : end]


def loops(region: list[tuple[int, str, str, str]]) -> list[tuple[int, int]]:
    """(first, last) address of each loop: a branch backwards."""
    branches = [(int(rest.split()[-1], 16), at) for at, _, name, rest in region if name == "BRA"]
    return [(target, at) for target, at in branches if target <= at]


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTRUCTION_SET)
def test_the_timed_loop_is_the_instruction_and_nothing_else(hopper: Callable[[str], Compiled], name: str) -> None:
    compiled = hopper(name)
    compiled.assert_clean()
    region = timed_region(compiled.sass)
    ((first, last),) = loops(region)
    accesses = [line for line in region if MEMORY.match(line[2]) and line[1] != NEVER]
    assert len(accesses) == INSTRUCTIONS, "merged, or joined by others"
    for at, predicate, opcode, _ in accesses:
        assert first <= at <= last, "moved out of the loop"
        assert re.fullmatch(INSTRUCTION_SET[name].sass, opcode) and predicate == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, what in INSTRUCTION_SET.items() if what.path == "load"])
def test_loads_of_a_pass_are_in_flight_together(hopper: Callable[[str], Compiled], name: str) -> None:
    region = timed_region(hopper(name).sass)
    loads = [rest for _, _, opcode, rest in region if re.fullmatch(INSTRUCTION_SET[name].sass, opcode)]
    targets = {rest.split(",")[0].strip() for rest in loads}
    assert len(targets) == INSTRUCTIONS, "a register written twice makes one load wait for another"


def test_kernels_have_the_name_and_the_block_that_the_benchmark_relies_on(hopper: Callable[[str], Compiled]) -> None:
    ptx = hopper("ldmatrix.x4").ptx
    assert f".entry {bank_conflicts.KERNEL_NAME}" in ptx
    assert f".maxntid {LANES * MAX_WARPS}, 1, 1" in ptx
    assert max(bank_conflicts.WARPS) == MAX_WARPS


@pytest.mark.parametrize("name", INSTRUCTION_SET)
@pytest.mark.parametrize("bits", [0, 3])
def test_addresses_from_the_cute_layout_are_the_expected_ones(name: str, bits: int) -> None:
    case = Case(name, bits)
    lanes = (0, 1, 6, 11, 17, 24, 31)
    with layouts_on_the_host():
        probe = BankProbe(case, case.what)
        found = [[int(offset) for offset in probe.offsets(lane)] for lane in lanes]
    np.testing.assert_array_equal(np.array(found).T, addresses(case)[:, lanes])


@pytest.mark.parametrize(
    ("name", "unswizzled", "half", "full"),
    [
        ("ldmatrix.x4", [8] * 4, [2] * 4, [1] * 4),
        ("ldmatrix.x4.trans", [8] * 4, [2] * 4, [1] * 4),
        ("stmatrix.x4", [8] * 4, [2] * 4, [1] * 4),
        ("st.shared.b32", [8], [2], [1]),
        ("ld.shared.v4 rows", [1] * 4, [1] * 4, [1] * 4),
        ("ld.shared.v4 columns", [8] * 4, [2] * 4, [1] * 4),
        ("cp.async.16 rows", [1] * 4, [1] * 4, [1] * 4),
        ("cp.async.16 halves", [2] * 4, [2] * 4, [2] * 4),
        ("cp.async.16 columns", [8] * 4, [8] * 4, [8] * 4),
    ],
)
def test_predicted_ways(name: str, unswizzled: list[int], half: list[int], full: list[int]) -> None:
    found = [ways(Case(name, bits), count_ways) for bits in bank_conflicts.SWIZZLES]
    assert found == [unswizzled, half, full]


def test_the_explorers_model_predicts_the_same() -> None:
    banks = pytest.importorskip("layouts.banks")
    for case in bank_conflicts.cases():
        assert ways(case, banks.ways) == ways(case, count_ways), case


def test_instructions_that_differ_in_their_conflicts_are_refused() -> None:
    answers = iter(range(INSTRUCTIONS))
    with pytest.raises(ValueError, match="differ in their conflicts"):
        ways(Case("ldmatrix.x4", 0), lambda lanes, width, copies: np.array([next(answers)]))


@pytest.mark.parametrize(("arguments", "complaint"), [(("ld", 0), "allowed: ldmatrix"), (("ldmatrix.x4", 4), "0 to 3")])
def test_a_case_that_does_not_exist_is_refused(arguments: tuple[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Case(*arguments)


@pytest.mark.parametrize("name", [name for name, what in INSTRUCTION_SET.items() if what.lane_bytes == 16])
def test_the_instructions_together_cover_the_tile_once(name: str) -> None:
    rows, cols = lane_coordinates(INSTRUCTION_SET[name])
    assert sorted((rows * 64 + cols).ravel().tolist()) == list(range(0, 64 * 64, 8))
    numbers = fragments(INSTRUCTION_SET[name])
    assert sorted(np.concatenate([numbers & 0xFFFF, numbers >> 16]).ravel().tolist()) == list(range(64 * 64))


def test_a_transposing_ldmatrix_hands_out_columns() -> None:
    plain, transposed = (fragments(INSTRUCTION_SET[f"ldmatrix.x4{suffix}"]) for suffix in ("", ".trans"))
    # Lane 5 of the first matrix: row 1, columns 2 and 3; transposed, rows 2 and 3 of column 1.
    assert [plain[0, 5, 0] & 0xFFFF, plain[0, 5, 0] >> 16] == [1 * 64 + 2, 1 * 64 + 3]
    assert [transposed[0, 5, 0] & 0xFFFF, transposed[0, 5, 0] >> 16] == [2 * 64 + 1, 3 * 64 + 1]


def test_the_tile_image_is_a_permutation_by_the_swizzle() -> None:
    image = tile_image(Case("ldmatrix.x4", 3), touched=False)
    assert sorted(image.tolist()) == list(range(64 * 64))
    assert image[5 * 64 + (2 ^ 5) * 8 + 3] == 5 * 64 + 2 * 8 + 3
    stored = tile_image(Case("st.shared.b32", 0), touched=True).reshape(64, 64)
    assert (stored[:, 16:] == POISON).all() and (stored[:, :16] != POISON).all()


@pytest.mark.parametrize(
    ("cycles", "wavefronts", "free", "verdict"),
    [
        (4.1, 4, (4.1, 4), "yes"),
        (32.5, 32, (4.1, 4), "yes"),
        (16.0, 32, (4.1, 4), "no"),  # half of the predicted wavefronts
        (48.0, 32, (4.1, 4), "no"),
        (7.0, 4, (7.0, 4), "issue"),
        (9.5, 4, (9.5, 4), "no"),
        (56.0, 32, (7.0, 4), "ratio"),
        (2.1, 1, (2.1, 1), "issue"),
        (12.0, 8, (12.0, 4), "hidden"),
        (14.0, 8, (12.0, 4), "no"),
    ],
)
def test_verdicts(cycles: float, wavefronts: int, free: tuple[float, int], verdict: str) -> None:
    assert bank_conflicts.judge(cycles, wavefronts, *free) == verdict


def rows_of(name: str, *cycles: float) -> list[bank_conflicts.Row]:
    rows = [
        bank_conflicts.Row(case, ways(case, count_ways), dict.fromkeys(bank_conflicts.WARPS, taken))
        for case, taken in zip([Case(name, bits) for bits in bank_conflicts.SWIZZLES], cycles, strict=True)
    ]
    bank_conflicts.judge_all(rows)
    return rows


def test_rows_are_judged_beside_the_conflict_free_one_and_printed() -> None:
    rows = rows_of("ldmatrix.x4", 32.4, 8.1, 4.05)
    assert [row.verdict for row in rows] == ["yes"] * 3
    assert [row.ratio for row in rows] == pytest.approx([8, 2, 1])
    head, unswizzled, *_ = bank_conflicts.table(rows, counted=False)
    assert head.split()[-2:] == ["ratio", "agree"]
    assert " ".join(unswizzled.split()) == "ldmatrix.x4 none 8 8 8 8 32 32.40 32.40 32.40 8.00 yes"
    assert not any(map(bank_conflicts.failed, rows))
    assert json.loads(json.dumps(rows[0].as_dict()))["predicted_wavefronts"] == 32


def test_disagreement_fails_unless_the_instruction_is_not_judged() -> None:
    assert [bank_conflicts.failed(row) for row in rows_of("ldmatrix.x4", 20.0, 8.0, 4.0)] == [True, False, False]
    copies = rows_of("cp.async.16 columns", 20.0, 12.0, 12.0)
    assert [row.verdict for row in copies] == ["no", "no", "no"] and not any(map(bank_conflicts.failed, copies))
    assert bank_conflicts.table(copies, counted=True)[1].endswith("-  (no)")


def test_a_counter_that_disagrees_fails_the_row() -> None:
    rows = rows_of("ldmatrix.x4", 32.0, 8.0, 4.0)
    rows[0].counted, rows[1].counted = 28.0, 8.01
    assert [bank_conflicts.failed(row) for row in rows] == [True, False, False]
    assert "but not the counter" in bank_conflicts.table(rows, counted=True)[1]


def test_a_case_that_fails_is_reported_and_left_out_of_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(bank_conflicts, "Probe", refuse)
    row = bank_conflicts.measure(Case("ldmatrix.x4", 0), torch.device("cpu"), count_ways)
    bank_conflicts.judge_all([row])
    assert row.problem == "RuntimeError: out of memory" and bank_conflicts.failed(row)
    assert bank_conflicts.table([row], counted=False)[1].endswith("32  failed: RuntimeError: out of memory")


CSV = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value"
"0","7","bank_probe_0","1","7","(256, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics",\
"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum","","4,096"
"0","7","bank_probe_0","1","7","(256, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics",\
"smsp__inst_executed_op_ldsm.sum","inst","n/a"
"1","7","bank_probe_0","1","7","(256, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics",\
"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum","","36,864"
"""


def test_counters_are_read_from_what_ncu_prints() -> None:
    low, high = bank_counters.parse_csv(CSV)
    assert low == {"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": 4096.0}
    found = bank_counters.per_instruction(INSTRUCTION_SET["ldmatrix.x4"], low, high, 8192)
    assert found == ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum", 4.0)
    assert bank_counters.per_instruction(INSTRUCTION_SET["st.shared.b32"], low, high, 8192) is None
    assert bank_counters.parse_csv("==ERROR== no permission\n") == []


def fake_ncu(folder: pathlib.Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder / "ncu"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_only_metrics_that_exist_are_asked_for(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld  Counter\nsmsp__inst_executed_op_ldsm  Counter"
    fake_ncu(tmp_path, f'[ "$1" = --query-metrics ] && printf "{known}\\n"', monkeypatch)
    expected = ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum", "smsp__inst_executed_op_ldsm.sum")
    assert bank_counters.available(str(tmp_path / "ncu")) == expected


def test_ncu_without_launches_says_why(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ncu(tmp_path, "echo '==ERROR== ERR_NVGPUCTRPERM'; exit 1", monkeypatch)
    with pytest.raises(bank_counters.CounterError, match="ERR_NVGPUCTRPERM"):
        bank_counters.profile(["true"], "bank_probe")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(bank_counters.CounterError, match="not on the PATH"):
        bank_counters.profile(["true"], "bank_probe")


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bank_conflicts.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
