"""The scenes of an sm90 backward row in two passes: one for dK and dV, of key tiles, and one for dQ, of query tiles."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Final

from cuteflash.problem import BwdProblem
from cuteflash.traits.bwd_two_pass_sm90 import CONSUMERS, BwdTwoPassTraitsSm90
from cuteflash.traits.sm90 import WARPGROUP, WGMMA_M

from .algebra import Layout, composition, concatenate
from .gradient_steps import STEP, GradientSteps
from .hopper import WARPGROUPS, Factor, HopperSteps, Transfer, When, example_tensor
from .key_tiles import TILE, ahead, global_tiles, load_steps, make_example_tma
from .read import ELEMENT_BYTES, Frame, Placed, fragment_order, global_tile, no_launch, shared_tile, smem_start
from .scene import Axis, Fragment, Kind, Role, Step, Tile, Touch

KEYS = "every key block"
LOADER = "one thread of the producer warp"
OF_P, OF_DS = "the warpgroup of P", "the warpgroup of dS"
CHUNK = 8  # elements that a thread passes to the other warpgroup at once
STAYS = "Summed up over all blocks of the loop."
TRANSPOSED = "Held transposed, keys as the product's rows: four neighbouring lanes hold a key's row together."
PRODUCER = Role("producer", 0, WARPGROUP, "warp 0 issues every TMA load; the others give up registers")


class ReaderDkv:
    """Reads the pass for dK and dV; make and use it inside `layouts.dsl.context`."""

    loop: Final = "query blocks"

    def __init__(self, kernel: Any) -> None:
        from cuteflash.kernels.sm90.bwd_dkv import DkvPass
        from cuteflash.kernels.sm90.bwd_dkv_mma import make_side

        self.kernel: Any = DkvPass(kernel.traits, kernel.problem)
        self.traits: BwdTwoPassTraitsSm90 = kernel.traits
        self.problem: BwdProblem = kernel.problem
        t = self.traits
        sizes: dict[Axis, int] = {"m": t.tile_m, "n": t.tile_n, "d": t.head_dim, "e": t.head_dim_v}
        # Both warpgroups have all of a tile's keys.
        self.frame, self.frame_ds = (Frame(sizes, 1, first, WARPGROUP, None) for first in (WARPGROUP, 2 * WARPGROUP))
        self.smem = self.kernel.make_tiles(smem_start())
        rings = types.SimpleNamespace(q=None, do=None)
        block: Any = types.SimpleNamespace(tiles=self.smem, rings=rings, launch=no_launch(1))
        self.p, self.ds = (make_side(self.kernel, block, of_p) for of_p in (True, False))
        self.of = self._operands()
        shared = {tile.id: tile for tile in self.tiles() if tile.space == "shared"}
        dtype = self.problem.operands.qk_dtype
        self.draw, self.draw_ds = (HopperSteps(frame, shared, dtype) for frame in (self.frame, self.frame_ds))

    def _operands(self) -> dict[str, tuple[Placed, Placed, Placed]]:
        """The operands and the accumulator of each product."""
        kernel, of_p, of_ds, t = self.kernel, self.frame, self.frame_ds, self.traits
        scores, dv, dk = kernel.tiled_mma_s(), *map(kernel.tiled_mma_gradient, (t.head_dim_v, t.head_dim))
        return {
            "S": (of_p.placed(scores, "A", "K"), of_p.placed(scores, "B", "Q"), of_p.placed(scores, "C", "S", True)),
            "dV": (of_p.placed(dv, "A", "P", True), of_p.placed(dv, "B", "dO", True), of_p.placed(dv, "C", "dV")),
            "dP": (
                of_ds.placed(scores, "A", "V"),
                of_ds.placed(scores, "B", "dO"),
                of_ds.placed(scores, "C", "dP", True),
            ),
            "dK": (of_ds.placed(dk, "A", "dS", True), of_ds.placed(dk, "B", "Q", True), of_ds.placed(dk, "C", "dK")),
        }

    def roles(self) -> tuple[Role, ...]:
        """The producer warpgroup, then the consumers."""
        return (
            PRODUCER,
            Role("consumer of P", WARPGROUP, WARPGROUP, "the scores, P and dV, of all keys of the tile"),
            Role("consumer of dS", 2 * WARPGROUP, WARPGROUP, "dP, dS and dK, of the same keys"),
        )

    def tiles(self) -> tuple[Tile, ...]:
        """Global tiles, then shared memory."""
        kernel, plan, frame = self.kernel, self.traits.smem_plan, self.frame
        k = shared_tile("K", kernel.smem_layout_k(), plan["k"].start, True, "")
        v = shared_tile("V", kernel.smem_layout_v(), plan["v"].start, True, "")
        lse, delta = (f"Each stage comes with its rows' {name}." for name in ("LSE", "delta"))
        return (
            *global_tiles(frame, self.problem),
            shared_tile("Q", kernel.smem_layout_q(), plan["q"].start, True, lse),
            k,
            self._weights_tile(),
            v,
            shared_tile("dO", kernel.smem_layout_do(), plan["do"].start, True, delta),
            dataclasses.replace(v, id="sdV", tensor="dV", note="In the place of V, which has been read."),
            dataclasses.replace(k, id="sdK", tensor="dK", note="In the place of K, which has been read."),
        )

    def _weights_tile(self) -> Tile:
        """P on its way between the warpgroups, in the order in which both hold it."""
        shape, stages = self.frame.shape("P"), self.traits.p_stage
        tv = self.frame.fragment("rP", self.of["dV"][0], self.p.tGrA, "").tv
        layout = fragment_order(tv, shape, WARPGROUP, CHUNK)
        note = "In the order of the threads' registers: each passes 16 bytes beside its neighbour's."
        if self.problem.scores.softcap:
            note += " P times the slope of the softcap, which dP is multiplied with."
        staged = concatenate(*layout.modes(), Layout(stages, shape[0] * shape[1]))
        base = self.traits.smem_plan["p"].start
        return Tile("sP", "P", "shared", shape, staged, base=base, stages=stages, note=note)

    def fragments(self) -> tuple[Fragment, ...]:
        """Operands and accumulators in registers, of the one warpgroup and of the other."""
        of, p, ds, make, make_ds = self.of, self.p, self.ds, self.frame.fragment, self.frame_ds.fragment
        rounded = "rounded: already in the threads that need it for A of the next product."
        capped = "P times the slope of the softcap, for the other warpgroup."
        slopes = (make("acc_P", of["S"][2], p.weights, capped),) if p.weights is not None else ()
        return (
            make("acc_S", of["S"][2], p.acc, TRANSPOSED),
            *slopes,
            make("rP", of["dV"][0], p.tGrA, f"P, {rounded}"),
            make("acc_dV", of["dV"][2], p.gradient, STAYS),
            make_ds("acc_dP", of["dP"][2], ds.acc, TRANSPOSED),
            make_ds("rW", self._weights(), ds.tGrA, "P as the other warpgroup rounded it."),
            make_ds("rdS", of["dK"][0], ds.tGrA, f"dS, {rounded}"),
            make_ds("acc_dK", of["dK"][2], ds.gradient, STAYS),
        )

    def _weights(self) -> Placed:
        """P in the registers of the warpgroup that multiplies dP with it: as its own operand dS."""
        mma = self.kernel.tiled_mma_gradient(self.traits.head_dim)
        return self.frame_ds.placed(mma, "A", "P", True)

    def steps(self) -> tuple[Step, ...]:
        """In the order in which data passes through a tile."""
        of = {key: value[2] for key, value in self.of.items()}
        of_p = GradientSteps(self.frame, of, self.problem, f"every warp of {OF_P}")
        of_ds = GradientSteps(self.frame_ds, of, self.problem, f"every warp of {OF_DS}")
        load_k, load_q, load_v, load_do = load_steps(self.draw, self.kernel, self.smem, LOADER)
        s, dv, dp, dk = self._products()
        exponentials = of_p.exponentials_in_place()
        if self.problem.scores.softcap:
            slopes = self.of["S"][2].touch_k_blocks("acc_P", "write", self.frame.first_thread)
            exponentials = dataclasses.replace(exponentials, touches=(*exponentials.touches, slopes))
        rp, rds = self.of["dV"][0], self.of["dK"][0]
        differentiate = of_ds.differentiate_in_place(("rW", self._weights()))
        return (
            *(load_k, load_q, s, exponentials, of_p.convert(rp, "acc_S"), self._give(), load_v, load_do, dp),
            *(self._take(), differentiate, of_ds.convert(rds, "acc_dP"), dv, dk, *self._epilogue()),
        )

    def _products(self) -> tuple[Step, ...]:
        """Two of each warpgroup."""
        before = "Issued before the second product of the step before, which runs beside what follows this one."
        beside = "Issued in the next step, after its first product."
        found = []
        for name, title, side, a, b, note in (
            ("S", "Sᵀ = K Qᵀ", self.p, "sK", "sQ", before),
            ("dV", "dV += Pᵀ dO", self.p, "rP", "sdO", beside),
            ("dP", "dPᵀ = V dOᵀ", self.ds, "sV", "sdO", before),
            ("dK", "dK += dSᵀ Q", self.ds, "rdS", "sQ", beside),
        ):
            is_of_p, is_gradient = side is self.p, a.startswith("r")
            views = (None, side.tGrB) if is_gradient else (side.tSrA, side.tSrB)
            placed = self.of[name]
            factors = Factor(placed[0], a, views[0]), Factor(placed[1], b, views[1]), Factor(placed[2], f"acc_{name}")
            draw, when = (self.draw, OF_P) if is_of_p else (self.draw_ds, OF_DS)
            found.append(draw.product(f"wgmma_{name.lower()}", title, factors, When("loop", STEP, when), note))
        return tuple(found)

    def _give(self) -> Step:
        """P to shared memory, for the other warpgroup."""
        source = ("acc_P", self.of["S"][2]) if self.problem.scores.softcap else ("rP", self.of["dV"][0])
        note = "Each thread stores 16 bytes beside its neighbour's, so that no bank is hit twice."
        if self.problem.scores.softcap:
            note = f"Rounded on the way. {note}"
        return self._passed("store_p", "P: registers → shared memory", "st.shared", source[0], note)

    def _take(self) -> Step:
        """P from shared memory, as the other warpgroup held it."""
        note = "The same 16 bytes that the other warpgroup's thread of that number stored."
        return self._passed("load_p", "P: shared memory → registers", "ld.shared", "rW", note)

    def _passed(self, id: str, title: str, kind: Kind, fragment: str, note: str) -> Step:
        stores = kind == "st.shared"
        frame = self.frame if stores else self.frame_ds
        tv = frame.fragment("rP", self.of["dV"][0], self.p.tGrA, "").tv
        registers = tv.mode(1)
        chunk, rest = composition(registers, Layout((CHUNK, registers.size() // CHUNK))).modes()
        split = concatenate(tv.mode(0), chunk, rest)
        held = Touch(fragment, "read" if stores else "write", split, frame.first_thread)
        mode: Any = "write" if stores else "read"
        passed = Touch("sP", mode, split, frame.first_thread, lane_bytes=CHUNK * ELEMENT_BYTES)
        role = f"every thread of {OF_P if stores else OF_DS}"
        touches = (held, passed) if stores else (passed, held)
        return Step(id, title, kind, f"{kind}.v4.b32", role, STEP, "loop", touches, note)

    def _epilogue(self) -> tuple[Step, ...]:
        """dV and dK to shared memory, then to global memory."""
        from cuteflash.atoms.sm90 import store_copy

        tma, smem, dtype = make_example_tma(self.kernel), self.smem, self.kernel.dtype
        found = []
        for tensor, side, atom, coords, tile, note in (
            ("dV", self.p, tma.store_dv, tma.gdV, smem.sV, "Rounded, into the place of V."),
            ("dK", self.ds, tma.store_dk, tma.gdK, smem.sK, "Scaled and rounded, into the place of K."),
        ):
            draw, owner = (self.draw, OF_P) if side is self.p else (self.draw_ds, OF_DS)
            copy, staging = store_copy(dtype, side.mma_gradient), When("epilogue", TILE, f"every warp of {owner}")
            read = "The other warpgroup reads that place: both have finished their products."
            found.append(draw.stage(tensor, copy, f"acc_{tensor}", staging, f"{note} {read}"))
            what = Transfer(tensor, atom, coords, tile, self.frame.shape(tensor)[0])
            storing = When("epilogue", TILE, f"one warp of {owner}")
            found.append(draw.store(what, storing, "Clipped to the rows that exist.", by_group=False))
        return tuple(found)


class ReaderDq:
    """Reads the pass for dQ; make and use it inside `layouts.dsl.context`."""

    loop: Final = "key blocks"

    def __init__(self, kernel: Any) -> None:
        from cuteflash.kernels.sm90.bwd_dq import DqPass
        from cuteflash.kernels.sm90.bwd_dq_mma import Tiles, make_query_warpgroup

        self.kernel: Any = DqPass(kernel.traits, kernel.problem)
        self.traits: BwdTwoPassTraitsSm90 = kernel.traits
        self.problem: BwdProblem = kernel.problem
        t = self.traits
        sizes: dict[Axis, int] = {"m": t.dq_tile_m, "n": t.dq_tile_n, "d": t.head_dim, "e": t.head_dim_v}
        self.frame = Frame(sizes, CONSUMERS, WARPGROUP, WARPGROUP)
        self.smem = Tiles(*map(self._smem, ("q", "do", "k", "v")))
        self.warpgroup = make_query_warpgroup(self.kernel, self.smem, no_launch(1))
        self.of = self._operands()
        shared = {tile.id: tile for tile in self.tiles() if tile.space == "shared"}
        self.draw = HopperSteps(self.frame, shared, self.problem.operands.qk_dtype)

    def _smem(self, name: str) -> Any:
        """A shared-memory tensor."""
        import cutlass.cute as cute

        layout = self.kernel.smem_layout(name)
        start = cute.recast_ptr(
            smem_start() + self.traits.dq_smem_plan[name].start, layout.inner, dtype=self.kernel.dtype
        )
        return cute.make_tensor(start, layout.outer)

    def _operands(self) -> dict[str, tuple[Placed, Placed, Placed]]:
        """The operands and the accumulator of each product."""
        frame, scores, dq = self.frame, self.kernel.tiled_mma_s(), self.kernel.tiled_mma_dq()
        return {
            "S": (frame.placed(scores, "A", "Q"), frame.placed(scores, "B", "K"), frame.placed(scores, "C", "S")),
            "dP": (frame.placed(scores, "A", "dO"), frame.placed(scores, "B", "V"), frame.placed(scores, "C", "dP")),
            "dQ": (frame.placed(dq, "A", "dS"), frame.placed(dq, "B", "K", True), frame.placed(dq, "C", "dQ")),
        }

    def roles(self) -> tuple[Role, ...]:
        """The producer warpgroup, then the consumers."""
        rows = ((i, i * WGMMA_M) for i in range(CONSUMERS))
        consumers = (
            Role(f"consumer {i}", (1 + i) * WARPGROUP, WARPGROUP, f"query rows {first} to {first + WGMMA_M - 1}")
            for i, first in rows
        )
        return (PRODUCER, *consumers)

    def tiles(self) -> tuple[Tile, ...]:
        """Global tiles, then shared memory."""
        kernel, plan, frame = self.kernel, self.traits.dq_smem_plan, self.frame
        wide, narrow = self.problem.operands.head_dim, self.problem.operands.head_dim_v

        def shared(tensor: str, note: str, parts: int = 1) -> Tile:
            name = tensor.lower()
            return shared_tile(tensor, kernel.smem_layout(name), plan[name].start, True, note, parts)

        q = shared("Q", "", CONSUMERS)
        return (
            global_tile(frame, "Q", wide, "A block's queries of one head."),
            global_tile(frame, "K", wide, "One block of keys."),
            global_tile(frame, "V", narrow, "One block of values."),
            global_tile(frame, "dO", narrow, "The gradient of the block's output."),
            global_tile(frame, "dQ", wide, "The gradient of the block's queries."),
            q,
            shared("K", "Read twice: keys are columns of the scores, and rows of the product dQ."),
            shared("V", ""),
            shared("dO", "", CONSUMERS),
            dataclasses.replace(q, id="sdQ", tensor="dQ", note="In the place of Q, which has been read."),
        )

    def fragments(self) -> tuple[Fragment, ...]:
        """Operands and accumulators in registers; products read other operands from shared memory."""
        of, wg, make = self.of, self.warpgroup, self.frame.fragment
        rows = "Four neighbouring lanes hold a row together."
        rounded = "dS, rounded: already in the threads that need it for A of the next product."
        return (
            make("acc_S", of["S"][2], wg.acc_S, rows),
            make("acc_dP", of["dP"][2], wg.acc_dP, rows),
            make("rdS", of["dQ"][0], wg.tQrdS, rounded),
            make("acc_dQ", of["dQ"][2], wg.acc_dQ, STAYS),
        )

    def steps(self) -> tuple[Step, ...]:
        """In the order in which data passes through a tile."""
        from cuteflash.atoms.sm90 import store_copy

        gradient = GradientSteps(self.frame, {key: value[2] for key, value in self.of.items()}, self.problem, each=KEYS)
        load_q, load_k, load_do, load_v, store_dq = self._transfers()
        s, dp, dq = self._products()
        p, ds = gradient.exponentials_in_place(), gradient.differentiate_rounded(self.of["dQ"][0])
        copy = store_copy(self.kernel.dtype, self.warpgroup.mma_dq)
        staged = self.draw.stage("dQ", copy, "acc_dQ", When("epilogue", TILE), "Scaled and rounded, in its Q's place.")
        return (load_q, load_k, s, p, load_do, load_v, dp, ds, dq, staged, store_dq)

    def _transfers(self) -> tuple[Step, ...]:
        """Q and dO once, K and V block by block; dQ at the end."""
        smem, traits = self.smem, self.traits
        once, often = When("prologue", TILE, LOADER), When("loop", KEYS, LOADER)
        found = []
        for tensor, tile, stages in (
            ("Q", smem.sQ, 0),
            ("K", smem.sK, traits.k_stage),
            ("dO", smem.sdO, 0),
            ("V", smem.sV, traits.v_stage),
        ):
            note = ahead(stages) if stages else "Once for each warpgroup."
            found.append(self.draw.load(self._moved(tensor, tile), often if stages else once, note))
        storing = When("epilogue", TILE, "warp 0 of every consumer warpgroup")
        moved = self._moved("dQ", smem.sQ, stores=True)
        return (*found, self.draw.store(moved, storing, "Clipped to the rows that exist."))

    def _moved(self, tensor: str, tile: Any, stores: bool = False) -> Transfer:
        """A TMA atom of the pass over an example tensor."""
        import cutlass.cute as cute

        from cuteflash.atoms import sm90 as atoms
        from cuteflash.kernels.sm90.bwd_load import rows_of

        name, operands = "q" if stores else tensor.lower(), self.problem.operands
        columns = operands.head_dim if name in ("q", "k") else operands.head_dim_v
        example, view = example_tensor(self.kernel.dtype, columns), rows_of("dense")
        make = atoms.tma_store if stores else atoms.tma_load
        layout = cute.select(self.kernel.smem_layout(name), mode=[0, 1])
        atom, coords = make(view(example), layout, self.kernel.box(name))
        return Transfer(tensor, atom, coords, tile, self.frame.part(tensor)[0])

    def _products(self) -> tuple[Step, ...]:
        """Three products of one key block, with the time of their issue according to the traits."""
        of, wg, when = self.of, self.warpgroup, When("loop", KEYS, WARPGROUPS)
        turn = "Issued in the warpgroup's turn." if self.traits.pingpong else "Issued at the start of a step."
        found = []
        for name, title, a, b, note in (
            ("S", "S = Q Kᵀ", ("sQ", wg.tSrQ), ("sK", wg.tSrK), turn),
            ("dP", "dP = dO Vᵀ", ("sdO", wg.tPrdO), ("sV", wg.tPrV), "Runs beside the exponentials of S."),
            ("dQ", "dQ += dS K", ("rdS", None), ("sK", wg.tQrK), "Waited for at once."),
        ):
            placed = of[name]
            factors = Factor(placed[0], *a), Factor(placed[1], *b), Factor(placed[2], f"acc_{name}")
            found.append(self.draw.product(f"wgmma_{name.lower()}", title, factors, when, note))
        return tuple(found)
