"""The scene of an sm90 forward row: TMA, WGMMA, one producer and its consumers, read from the kernel's own objects."""

from __future__ import annotations

from typing import Any, Final

from cuteflash.problem import DTYPE_BYTES, FwdProblem
from cuteflash.traits.sm90 import WARPGROUP, WGMMA_M

from .hopper import (
    CONSUMERS,
    WARPGROUPS,
    Factor,
    HopperSteps,
    Transfer,
    When,
    example_tensor,
    example_vt,
)
from .parts import part_tile, store_octets, store_part
from .read import Frame, Placed, global_tile, no_launch, products, shared_tile, smem_start
from .scene import Axis, Fragment, Role, Step, Tile
from .softmax_steps import SoftmaxSteps

TILE, BLOCK = "once a tile", "every key block"


class ReaderSm90:
    """Reads one sm90 kernel; make and use it inside `layouts.dsl.context`."""

    loop: Final = "key blocks"

    def __init__(self, kernel: Any) -> None:
        from cuteflash.kernels.sm90.warpgroup import make_warpgroup

        self.kernel, self.traits = kernel, kernel.traits
        self.problem: FwdProblem = kernel.problem
        t = self.traits
        self.sizes: dict[Axis, int] = {"m": t.tile_m, "n": t.tile_n, "d": t.head_dim, "e": t.head_dim_v}
        self.frame = self.make_frame()
        self.smem = kernel.make_tiles(smem_start())
        self.warpgroup = make_warpgroup(kernel, self.smem, no_launch(1))
        self.of = self.operands()
        shared = {tile.id: tile for tile in self.tiles() if tile.space == "shared"}
        self.draw = HopperSteps(self.frame, shared, self.problem.operands.product_dtype)

    def make_frame(self) -> Frame:
        """The block's tile and the consumer warpgroups."""
        return Frame(self.sizes, self.traits.mma_warpgroups, self.traits.first_consumer, WARPGROUP)

    def operands(self) -> dict[str, Placed]:
        """Those of both products, by tensor."""
        return products(self.frame, self.kernel)

    def roles(self) -> tuple[Role, ...]:
        """The producer warpgroup, if there is one, then the consumers."""
        consumers = [
            Role(
                f"consumer {i}",
                self.traits.first_consumer + i * WARPGROUP,
                WARPGROUP,
                f"query rows {i * WGMMA_M} to {i * WGMMA_M + WGMMA_M - 1}",
            )
            for i in range(self.traits.mma_warpgroups)
        ]
        if not self.traits.warp_specialized:
            return tuple(consumers)
        producer = Role("producer", 0, WARPGROUP, "warp 0 issues every TMA load; the others give up registers")
        return (producer, *consumers)

    def tiles(self) -> tuple[Tile, ...]:
        """Global tiles, then shared memory."""
        operands, kernel, plan = self.problem.operands, self.kernel, self.traits.smem_plan
        share = "O is staged in Q's memory; the next Q waits for its store." if self.traits.share_q_o else ""
        ahead = "The next tile's Q loads into the other stage." if self.traits.q_stage > 1 else ""
        parts = self.traits.mma_warpgroups
        shared = [
            shared_tile("Q", kernel.smem_layout_q(), plan["q"].start, True, share or ahead, parts, self.element_bytes),
            *self.tiles_of_k(),
            *self.tiles_of_v(),
        ]
        if self.traits.stages_o:
            shared.append(shared_tile("O", kernel.smem_layout_o(), plan["o"].start, True, share, parts))
        if not self.traits.p_in_regs:
            shared.insert(-1, shared_tile("P", kernel.smem_layout_p(), plan["p"].start, True, "", parts))
        return (
            global_tile(self.frame, "Q", operands.head_dim, "A block's queries of one head.", self.element_bytes),
            global_tile(self.frame, "K", operands.head_dim, "One block of keys.", DTYPE_BYTES[operands.k_dtype]),
            self.global_v(),
            global_tile(self.frame, "O", operands.head_dim_v, "The block's output."),
            *((part_tile(self.frame),) if self.problem.is_split else ()),
            *shared,
        )

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of Q, K, V and P."""
        return DTYPE_BYTES[self.problem.operands.qk_dtype]

    def global_v(self) -> Tile:
        """V in global memory."""
        operands = self.problem.operands
        nbytes = DTYPE_BYTES[operands.v_dtype]
        return global_tile(self.frame, "V", operands.head_dim_v, "One block of values.", nbytes)

    def tiles_of_k(self) -> tuple[Tile, ...]:
        """K in shared memory."""
        layout, start = self.kernel.smem_layout_k(), self.traits.smem_plan["k"].start
        return (shared_tile("K", layout, start, True, "", element_bytes=self.element_bytes),)

    def tiles_of_v(self) -> tuple[Tile, ...]:
        """V in shared memory."""
        layout, start = self.kernel.smem_layout_v(), self.traits.smem_plan["v"].start
        return (shared_tile("V", layout, start, True, "Rows are keys: the product's k extent."),)

    def fragments(self) -> tuple[Fragment, ...]:
        """Operands and accumulators in registers; products read other operands from shared memory."""
        wg, make = self.warpgroup, self.frame.fragment
        found = [
            make("acc_S", self.of["S"], wg.acc_S, "Four neighbouring lanes hold a row together."),
            make("acc_O", self.of["O"], wg.acc_O, "Stays for the whole tile."),
        ]
        if self.traits.p_in_regs:
            note = "The S accumulators, rounded: already in the threads that need them for A of the next product."
            found.insert(1, make("rP", self.of["P"], wg.tOrP, note))
        if self.traits.q_in_regs:
            found.insert(
                0,
                make(
                    "rQ",
                    self.of["Q"],
                    wg.tSrQ,
                    "Stays for the whole tile; its shared memory is free for the next one.",
                ),
            )
        return tuple(found)

    def steps(self) -> tuple[Step, ...]:
        """In the order of a tile."""
        tma, ahead = self._tma(), f"Up to {self.traits.kv_stage} tiles ahead of the products."
        if not self.traits.warp_specialized:
            count = self.traits.kv_stage - 1
            ahead = f"{count} block{'s' if count > 1 else ''} ahead of the products, between two steps of this warp."
        draw, smem = self.draw, self.smem
        loader = "one thread of the producer warp" if self.traits.warp_specialized else "one thread of consumer 0"
        once, often = When("prologue", TILE, loader), When("loop", BLOCK, loader)
        load_q = draw.load(self._moved("Q", tma.load_q, tma.gQ, smem.sQ), once, "Once for each warpgroup.")
        load_k = self.load_k(tma, often, ahead)
        load_v = self.load_v(tma, often, ahead)
        fetch = (draw.fetch("Q", self.kernel.copy_q(), When("prologue", TILE)),) if self.traits.q_in_regs else ()
        qk, pv = self._products()
        part = (store_part(self.finishing.frame, self.of["O"]),) if self.problem.is_split else ()
        return (load_q, *fetch, *load_k, qk, *self._softmax(), *load_v, pv, *self._storing(tma), *part)

    def _storing(self, tma: Any) -> tuple[Step, ...]:
        """O's way to memory: through shared memory, or from registers."""
        if not self.traits.stages_o:
            return (store_octets(self.finishing.frame, self.of["O"]),)
        rounded = "Divided by the row sums and rounded."
        stage_o = self.finishing.stage("O", self.kernel.copy_o(), "acc_O", When("epilogue", TILE), rounded)
        storing = When("epilogue", TILE, "warp 0 of every consumer warpgroup")
        moved_o = self._moved("O", tma.store_o, tma.gO, self.smem.sO)
        return stage_o, self.finishing.store(moved_o, storing, "Clipped to the rows that exist.")

    @property
    def finishing(self) -> HopperSteps:
        """What writes a tile's O."""
        return self.draw

    def load_k(self, tma: Any, when: When, ahead: str) -> tuple[Step, ...]:
        """The steps that bring K of a block to where the product reads it."""
        return (self.draw.load(self._moved("K", tma.load_k, tma.gK, self.smem.sK), when, ahead),)

    def load_v(self, tma: Any, when: When, ahead: str) -> tuple[Step, ...]:
        """The steps that bring V of a block to where the product reads it."""
        return (self.draw.load(self._moved("V", tma.load_v, tma.gV, self.smem.sV), when, ahead),)

    def _tma(self) -> Any:
        """The kernel's TMA atoms over example tensors."""
        operands, dtype = self.problem.operands, self.kernel.dtype
        wide, narrow = (example_tensor(dtype, head_dim) for head_dim in (operands.head_dim, operands.head_dim_v))
        values = example_vt(dtype, operands.head_dim_v) if operands.transposed_v else narrow
        return self.kernel.make_tma(wide, wide, values, example_tensor(self.kernel.out_dtype, operands.head_dim_v))

    def _moved(self, tensor: str, atom: Any, coords: Any, smem: Any) -> Transfer:
        return Transfer(tensor, atom, coords, smem, self.frame.part(tensor)[0])

    def _products(self) -> tuple[Step, Step]:
        """S = Q K^T and O += P V of one key block, with the time of their issue according to the traits."""
        overlap, turn = self.traits.overlap, " in the warpgroup's turn" if self.traits.pingpong else ""
        before = (
            f"Issued{turn}, before the PV product of the block before" if overlap else f"Issued{turn}, then waited for"
        )
        after = (
            "Issued after the QK product of the next block, and runs beside its softmax"
            if overlap
            else "Waited for at once"
        )
        of, wg, when = self.of, self.warpgroup, When("loop", BLOCK, WARPGROUPS)
        q = Factor(of["Q"], "rQ") if self.traits.q_in_regs else Factor(of["Q"], "sQ", wg.tSrQ)
        p = Factor(of["P"], "rP") if self.traits.p_in_regs else Factor(of["P"], "sP", wg.tOrP)
        k, v = Factor(of["K"], "sK", wg.tSrK), Factor(of["V"], "sV", wg.tOrV)
        s, o = Factor(of["S"], "acc_S"), Factor(of["O"], "acc_PV" if self.traits.two_level else "acc_O")
        title = "P V, from zero" if self.traits.two_level else "O += P V"
        return (
            self.draw.product("wgmma_qk", "S = Q K^T", (q, k, s), when, f"{before}."),
            self.draw.product("wgmma_pv", title, (p, v, o), when, f"{after}."),
        )

    def _softmax(self) -> tuple[Step, ...]:
        """The steps that turn the scores of a block into P and rescale O to the new maxima."""
        traits = self.traits
        softmax = SoftmaxSteps(self.frame, self.of, self.problem, CONSUMERS, traits.fixed_max)
        hand_over = softmax.convert() if traits.p_in_regs else self._stage_p()
        between = "After the next QK product has been issued and before the PV product is."
        steps = [
            softmax.moving(early_rows=traits.exp_rows_before_wait if traits.overlap else None),
            hand_over,
            softmax.rescale(between if traits.rescale_in_product else "Before the PV product is issued."),
        ]
        if traits.fixed_max:
            steps += [softmax.fixed(traits.exp_rows_before_wait), softmax.repair()]
        return tuple(steps)

    def _stage_p(self) -> Step:
        return self.draw.stage("P", self.kernel.copy_p(), "acc_S", When("loop", BLOCK), "")
