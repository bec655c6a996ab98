"""The scene of an sm90 backward row in one pass: five WGMMA products and the sum of dQ in memory."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

from cuteflash.problem import BwdProblem
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.sm90 import WARPGROUP, WGMMA_M

from .algebra import Layout, composition, concatenate
from .gradient_steps import STEP, GradientSteps
from .hopper import WARPGROUPS, Factor, HopperSteps, Transfer, When
from .key_tiles import LONE, TILE, global_tiles, load_steps, make_example_tma
from .read import Frame, Placed, fragment_order, shared_tile, smem_start
from .scene import Axis, Fragment, Role, Step, Tile, Touch

BULK_ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
LOADER = "one thread of warp 0"
CHUNK = 4  # fp32 elements that a thread stores at once
FP32 = 4  # bytes
WARP = 32


class ReaderBwdSm90:
    """Reads one kernel; make and use it inside `layouts.dsl.context`."""

    loop: Final = "query blocks"

    def __init__(self, kernel: Any) -> None:
        from cuteflash.kernels.sm90.bwd_dq_product import make_dq_product
        from cuteflash.kernels.sm90.bwd_warpgroup import make_products

        self.kernel = kernel
        self.traits: BwdTraitsSm90 = kernel.traits
        self.problem: BwdProblem = kernel.problem
        t = self.traits
        sizes: dict[Axis, int] = {"m": t.tile_m, "n": t.tile_n, "d": t.head_dim, "e": t.head_dim_v}
        self.frame = Frame(sizes, t.mma_warpgroups, WARPGROUP, WARPGROUP, split="n")
        shares: dict[str, Axis | None] = {"rows": "m", "columns": "d", "transposed": "d"}
        self.dq_frame = dataclasses.replace(self.frame, split=shares.get(t.dq))
        if t.is_dq_apart:
            first_thread = (1 + t.mma_warpgroups) * WARPGROUP
            self.dq_frame = dataclasses.replace(self.dq_frame, groups=1, first_thread=first_thread)
        self.smem = kernel.make_tiles(smem_start())
        self.held = make_products(kernel, self.smem, 0, 0)
        self.held_dq = make_dq_product(kernel, self.smem, 0, 0)
        self.of = self._operands()
        shared = {tile.id: tile for tile in self.tiles() if tile.space == "shared"}
        self.draw = HopperSteps(self.frame, shared, self.problem.operands.qk_dtype)

    def _operands(self) -> dict[str, tuple[Placed, Placed, Placed]]:
        """The operands and the accumulator of each product."""
        kernel, frame, dq = self.kernel, self.frame, self.dq_frame
        s, dp = kernel.tiled_mma_s(), kernel.tiled_mma_dp()
        dv, dk = kernel.tiled_mma_dv(), kernel.tiled_mma_dk()
        mma_dq, is_transposed = kernel.tiled_mma_dq(), self.traits.is_dq_transposed
        ds, k = "BA" if is_transposed else "AB"
        operands_dq = dq.placed(mma_dq, ds, "dS"), dq.placed(mma_dq, k, "K", transposed=True)  # type: ignore[arg-type]
        return {
            "S": (frame.placed(s, "A", "K"), frame.placed(s, "B", "Q"), frame.placed(s, "C", "S", True)),
            "dP": (frame.placed(dp, "A", "V"), frame.placed(dp, "B", "dO"), frame.placed(dp, "C", "dP", True)),
            "dV": (frame.placed(dv, "A", "P", True), frame.placed(dv, "B", "dO", True), frame.placed(dv, "C", "dV")),
            "dK": (frame.placed(dk, "A", "dS", True), frame.placed(dk, "B", "Q", True), frame.placed(dk, "C", "dK")),
            "dQ": (
                *(operands_dq[::-1] if is_transposed else operands_dq),
                dq.placed(mma_dq, "C", "dQ", is_transposed),
            ),
        }

    def roles(self) -> tuple[Role, ...]:
        """The producer warpgroup, then the consumers, then a warpgroup for dQ if there is one."""
        traits = self.traits
        adders = ", ".join(str(1 + part) for part in range(traits.mma_warpgroups))
        what = "one for each consumer warpgroup" if not traits.is_dq_apart else "in turns"
        does = (
            f"warp 0 issues every TMA load, warps {adders} add dQ to memory, {what}, "
            f"warp {self._storing_warp} stores dK and dV"
            f"{' and hands out the tiles of packed sequences' if traits.persistent else ''}"
        )
        consumers = (
            Role(f"consumer {i}", (1 + i) * WARPGROUP, WARPGROUP, f"keys {i * WGMMA_M} to {i * WGMMA_M + WGMMA_M - 1}")
            for i in range(traits.mma_warpgroups)
        )
        first = self.dq_frame.first_thread
        apart = (Role("dQ", first, WARPGROUP, "dQ of every step"),) if traits.is_dq_apart else ()
        return (Role("producer", 0, WARPGROUP, does), *consumers, *apart)

    @property
    def _storing_warp(self) -> int:
        """The producer's warp that stores dK and dV."""
        return 1 + self.traits.mma_warpgroups

    def tiles(self) -> tuple[Tile, ...]:
        """Global tiles, then shared memory."""
        kernel, plan, frame = self.kernel, self.traits.smem_plan, self.frame
        k = shared_tile("K", kernel.smem_layout_k(), plan["k"].start, True, "")
        v = shared_tile("V", kernel.smem_layout_v(), plan["v"].start, True, "")
        ds_note = "Rows are queries, as dQ needs them: the transpose of what the threads hold."
        do_note = "Each stage comes with its rows' delta."
        return (
            *global_tiles(frame, self.problem),
            self._dq_tile("gdQ", "global", 0, False),
            shared_tile("Q", kernel.smem_layout_q(), plan["q"].start, True, "Each stage comes with its rows' LSE."),
            k,
            v,
            shared_tile("dO", kernel.smem_layout_do(), plan["do"].start, True, do_note),
            shared_tile("dS", kernel.smem_layout_ds(), plan["ds"].start, True, ds_note),
            self._dq_tile("sdQ", "shared", plan["dq"].start, self.traits.is_dq_whole),
            dataclasses.replace(v, id="sdV", tensor="dV", note="In the place of V, which has been read."),
            dataclasses.replace(k, id="sdK", tensor="dK", note="In the place of K, which has been read."),
        )

    def _dq_tile(self, id: str, space: Any, base: int, staged: bool) -> Tile:
        """dQ in fp32 in the order in which the threads hold it: 16 bytes of a thread beside those of the next one."""
        rows, cols = self.traits.dq_part
        tv = self._dq_owners()
        shape = self.frame.shape("dQ")
        layout = fragment_order(tv, shape, WARPGROUP, CHUNK)
        if staged:
            layout = concatenate(*layout.modes(), Layout(self.traits.dq_stages, rows * cols))
        note = "fp32, in the order of the threads' registers: each stores 16 bytes beside its neighbour's."
        if space == "global":
            note = f"The sum over all key blocks: {note} A kernel after this one rounds it to dQ."
        return Tile(
            id,
            "dQ",
            space,
            shape,
            layout,
            base=base,
            stages=self.traits.dq_stages if staged else 1,
            note=note,
            element_bytes=FP32,
        )

    def _dq_owners(self) -> Layout:
        """(thread, register element) to element of dQ, of all threads that hold a tile together."""
        acc = self.dq_frame.fragment("acc_dQ", self.of["dQ"][2], self.held_dq.acc, "").tv
        return concatenate(acc.mode(0).mode(0), acc.mode(1)) if self.traits.dq == "turns" else acc

    def fragments(self) -> tuple[Fragment, ...]:
        """Operands and accumulators in registers; products read other operands from shared memory."""
        held, of, make = self.held, self.of, self.frame.fragment
        transposed = "Held transposed, keys as the product's rows: four neighbouring lanes hold a key's row together."
        rounded = "rounded: already in the threads that need it for A of the next product."
        whose = {
            "turns": "Whole tiles in turns: one warpgroup in even steps, the other in odd ones.",
            "apart": "Whole tiles, in a warpgroup that does nothing else.",
            "rows": "Each warpgroup has half of the rows.",
        }.get(self.traits.dq, "Each warpgroup has half of the columns.")
        stays = "Summed up over all query blocks."
        kept = "Stays for the whole tile."
        keys = (make("rK", of["S"][0], held.tSrK, kept),) if self.traits.k_in_regs else ()
        values = (make("rV", of["dP"][0], held.tPrV, kept),) if self.traits.v_in_regs else ()
        return (
            *keys,
            *values,
            make("acc_S", of["S"][2], held.acc_S, transposed),
            make("rP", of["dV"][0], held.tVrP, f"P, {rounded}"),
            make("acc_dP", of["dP"][2], held.acc_dP, transposed),
            make("rdS", of["dK"][0], held.tKrdS, f"dS, {rounded}", "acc_dP"),
            make("acc_dV", of["dV"][2], held.acc_dV, stays),
            make("acc_dK", of["dK"][2], held.acc_dK, stays),
            self.dq_frame.fragment(
                "acc_dQ", of["dQ"][2], self.held_dq.acc, whose, "" if self.traits.is_dq_apart else "acc_S"
            ),
        )

    def steps(self) -> tuple[Step, ...]:
        """In the order in which data passes through a tile."""
        gradient = GradientSteps(self.frame, {key: value[2] for key, value in self.of.items()}, self.problem)
        load_k, load_q, load_v, load_do = load_steps(self.draw, self.kernel, self.smem, LOADER)
        s, dp, dv, dk, dq = self._products()
        rp, rds = self.of["dV"][0], self.of["dK"][0]
        p, ds = gradient.exponentials(rp), gradient.differentiate(rp, rds)
        copy_ds = self.kernel.copy_ds()
        stage_ds = self.draw.stage(
            "dS",
            copy_ds,
            "rdS",
            When("loop", STEP),
            "Transposed on the way, so that rows are queries.",
            transposed=True,
        )
        fetch = functools.partial(self.draw.fetch, when=When("prologue", TILE))
        fetch_k = (fetch("K", self.kernel.copy_k()),) if self.traits.k_in_regs else ()
        fetch_v = (fetch("V", self.kernel.copy_v()),) if self.traits.v_in_regs else ()
        return (
            *(load_k, *fetch_k, load_q, s, p, load_v, *fetch_v, load_do, dp, ds, dv, stage_ds, dk, dq),
            self._store_dq(),
            self._add_dq(),
            *self._epilogue(),
        )

    def _products(self) -> tuple[Step, ...]:
        """The five products, with the time of their issue according to the traits."""
        held, apart = self.held, self.traits.is_dq_apart
        first = "Issued in the warpgroup's turn." if self.traits.pingpong else "Issued at the start of a step."
        late = "Of the step before: the other warpgroup's dS has had a step of time to arrive."
        when, of = When("loop", STEP, WARPGROUPS), self.of
        parts = {
            "S": (("rK", None) if self.traits.k_in_regs else ("sK", held.tSrK), ("sQ", held.tSrQ)),
            "dP": (("rV", None) if self.traits.v_in_regs else ("sV", held.tPrV), ("sdO", held.tPrdO)),
            "dV": (("rP", None), ("sdO", held.tVrdO)),
            "dK": (("rdS", None), ("sQ", held.tKrQ)),
            "dQ": (("sdS", self.held_dq.of_ds), ("sK", self.held_dq.of_k)),
        }
        is_transposed = self.traits.is_dq_transposed
        if is_transposed:
            parts["dQ"] = parts["dQ"][::-1]
        told = {
            "S": ("Sᵀ = K Qᵀ", first),
            "dP": ("dPᵀ = V dOᵀ", "Runs beside the exponentials of S."),
            "dV": ("dV += Pᵀ dO", "Issued as soon as P is rounded; beside dS."),
            "dK": ("dK += dSᵀ Q", f"Beside the copies of dS {'' if apart else 'and of dQ '}to shared memory."),
            "dQ": (
                "dQᵀ = Kᵀ dSᵀ" if is_transposed else "dQ = dS K",
                "As soon as the consumers have written dS, beside their next step." if apart else late,
            ),
        }
        found = []
        for name, (title, note) in told.items():
            (a, view_a), (b, view_b) = parts[name]
            factors = (
                Factor(of[name][0], a, view_a),
                Factor(of[name][1], b, view_b),
                Factor(of[name][2], f"acc_{name}"),
            )
            more = {"frame": self.dq_frame} if name == "dQ" else {}
            issued = dataclasses.replace(when, role="the dQ warpgroup") if name == "dQ" and apart else when
            found.append(self.draw.product(f"wgmma_{name.lower()}", title, factors, issued, note, **more))
        return tuple(found)

    def _store_dq(self) -> Step:
        """Fragments to shared memory, for the warps that add them."""
        tv = self.dq_frame.fragment("acc_dQ", self.of["dQ"][2], self.held_dq.acc, "").tv
        registers, first = tv.mode(1), self.dq_frame.first_thread
        apart = self.traits.is_dq_apart
        note = "Each thread stores 16 bytes beside its neighbour's, so that no bank is hit twice."
        chunk, rest = composition(registers, Layout((CHUNK, registers.size() // CHUNK))).modes()
        split = concatenate(tv.mode(0), chunk, rest)
        return Step(
            "store_dq",
            "dQ: registers → shared memory",
            "st.shared",
            "st.shared.v4.f32",
            "every thread of the dQ warpgroup" if apart else "every consumer thread",
            STEP,
            "loop",
            (
                Touch("acc_dQ", "read", split, first),
                Touch("sdQ", "write", split, first, lane_bytes=CHUNK * FP32),
            ),
            note if apart else f"Of the step before. {note}",
        )

    def _add_dq(self) -> Step:
        """One bulk addition for each part of a tile."""
        rows, cols = self.dq_frame.part("dQ")
        block = Layout((rows, cols), (1, self.frame.shape("dQ")[0]))
        lanes = self.dq_frame.all_groups(Layout(WARP, 0), "dQ")
        tv = concatenate(lanes, block, Layout(1, 0))
        note = "One instruction adds a warpgroup's part to the sum in memory, which L2 does."
        if self.problem.is_deterministic:
            note += (
                " Key blocks take turns at a tile, in ascending order, so that the sum has the same bits every time."
            )
        if self.traits.lone_tiles:
            note += f" {LONE}"
        if self.traits.held_dq:
            where = "stays in shared memory" if self.traits.is_dq_apart else "goes to memory and back"
            note += (
                " Of a dense batch a block has all keys of a head, if they are few, and nobody else adds: between key "
                f"tiles the sum {where}, and the last one stores it, rounded."
            )
        if self.traits.last_rounds:
            who = (
                "The last block whose turn it is at a tile waits until"
                if self.kernel.in_turn
                else "A block that gets a stage of sdQ when"
            )
            note += (
                f" {who} all others have added to the tile brings the sum back with the stage, adds its part in "
                "registers and stores dQ, rounded; nothing is left of it for the kernel after this one."
            )
        return Step(
            "add_dq",
            "dQ: added to the sum in global memory",
            "bulk add",
            BULK_ADD,
            "one thread of a producer warp for each part",
            STEP,
            "loop",
            (Touch("sdQ", "read", tv, WARP), Touch("gdQ", "write", tv, WARP)),
            note,
        )

    def _epilogue(self) -> tuple[Step, ...]:
        """dV and dK to shared memory, then to global memory."""
        kernel, tma, smem = self.kernel, make_example_tma(self.kernel), self.smem
        staging, storing = When("epilogue", TILE), When("epilogue", TILE, f"warp {self._storing_warp}")
        copies = (
            ("dV", kernel.copy_dv(), tma.store_dv, tma.gdV, smem.sV, "Rounded, into the place of V."),
            ("dK", kernel.copy_dk(), tma.store_dk, tma.gdK, smem.sK, "Scaled and rounded, into the place of K."),
        )
        found = []
        for tensor, copy, atom, coords, tile, note in copies:
            found.append(self.draw.stage(tensor, copy, f"acc_{tensor}", staging, note))
            what = Transfer(tensor, atom, coords, tile, self.frame.shape(tensor)[0])
            found.append(self.draw.store(what, storing, "Clipped to the rows that exist.", by_group=False))
        return tuple(found)
