"""The scene of an sm80 row: cp.async, ldmatrix, mma.sync, read from the kernel's own layouts, copies and fragments."""

from __future__ import annotations

from typing import Any, Final

from cuteflash.problem import FwdProblem

from .read import Frame, Placed, global_tile, no_launch, products, ptx_type, shared_tile, smem_start
from .scene import Fragment, Role, Step, Tile, Touch
from .softmax_steps import SoftmaxSteps

CP_ASYNC = "cp.async.cg.shared.global [dst], [src], 16"
THROUGH_REGISTERS = "ld.global.v4.b32, then st.shared.v4.b32"
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
LDMATRIX_TRANS = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32"
ALL = "every thread"
WARPS = "every warp"


class ReaderSm80:
    """Reads one sm80 kernel; make and use it inside `layouts.dsl.context`."""

    loop: Final = "key blocks"

    def __init__(self, kernel: Any) -> None:
        from cutlass import Int32

        from cuteflash.kernels.sm80.fwd_mma import make_fragments

        self.kernel, self.traits = kernel, kernel.traits
        self.problem: FwdProblem = kernel.problem
        t = self.traits
        self.frame = Frame({"m": t.tile_m, "n": t.tile_n, "d": t.head_dim, "e": t.head_dim_v}, 1, 0, t.num_threads)
        self.registers = make_fragments(kernel, kernel.make_tiles(smem_start()), no_launch(1), Int32(0))
        self.of = products(self.frame, kernel)

    def roles(self) -> tuple[Role, ...]:
        """All warps do the same."""
        rows = self.traits.tile_m // self.traits.num_warps
        return (Role("warps", 0, self.traits.num_threads, f"loads, products, softmax, stores; {rows} query rows each"),)

    def tiles(self) -> tuple[Tile, ...]:
        """Global tiles, then shared memory."""
        problem, kernel, plan = self.problem, self.kernel, self.traits.smem_plan
        return (
            global_tile(self.frame, "Q", problem.operands.head_dim, "A block's queries of one head."),
            global_tile(self.frame, "K", problem.operands.head_dim, "One block of keys."),
            global_tile(self.frame, "V", problem.operands.head_dim_v, "One block of values."),
            global_tile(self.frame, "O", problem.operands.head_dim_v, "The block's output."),
            shared_tile("Q", kernel.smem_layout_q(), plan["q"].start, False, ""),
            shared_tile("K", kernel.smem_layout_k(), plan["k"].start, False, ""),
            shared_tile("V", kernel.smem_layout_v(), plan["v"].start, False, ""),
            shared_tile(
                "O", kernel.smem_layout_o(), plan["o"].start, False, "Overlaps Q, V and K, which are no longer needed."
            ),
        )

    def fragments(self) -> tuple[Fragment, ...]:
        """Operands and accumulators of both products."""
        held = self.registers
        blocks = 1 + self.traits.ahead
        live = f"{blocks} of its k-blocks {'are' if blocks > 1 else 'is'} live at a time."
        copies = "Every warp needs all of it: each element is in the registers of one thread of every warp."
        q_note = "Stays for the whole tile." if self.traits.q_in_regs else live
        p_note = "The S accumulators, rounded: already in the threads that need them for A of the next product."
        make = self.frame.fragment
        return (
            make("rQ", self.of["Q"], held.rQ, q_note),
            make("rK", self.of["K"], held.rK, f"{copies} {live}"),
            make("acc_S", self.of["S"], held.acc_S, "Four neighbouring lanes hold a row together."),
            self._p_fragment(p_note),
            make("rV", self.of["V"], held.rVt, f"{copies} {live}"),
            make("acc_O", self.of["O"], held.acc_O, "Stays for the whole tile."),
        )

    def _p_fragment(self, note: str) -> Fragment:
        from cutlass import cute

        from cuteflash.core.views import acc_as_operand_a

        rounded = cute.make_rmem_tensor_like(self.registers.acc_S, self.kernel.dtype)
        return self.frame.fragment("rP", self.of["P"], acc_as_operand_a(rounded), note)

    def steps(self) -> tuple[Step, ...]:
        """In the order in which data passes through a tile."""
        fetch_q = self._fetch("Q", self.kernel.copy_q(), once=self.traits.q_in_regs)
        scores = (self._load("Q"), self._load("K"), fetch_q, self._fetch("K", self.kernel.copy_k()))
        values = (self._load("V"), self._fetch("V", self.kernel.copy_v()))
        qk, *softmax, pv = self._block()
        return (*scores, qk, *softmax, *values, pv, *self._epilogue())

    def _load(self, tensor: str) -> Step:
        """Global to shared memory: with one stage K and V load in turn, with more whole blocks load ahead."""
        stages, past = self.traits.kv_stage, self.traits.async_copy
        note = ""
        if tensor != "Q" and stages > 1:
            note = f"{stages - 1} block{'s' if stages > 2 else ''} ahead of the products. "
        elif tensor != "Q" and not self.traits.eager_loads:
            note = "At the start of a step, which waits for K and V. "
        elif tensor != "Q":
            note = f"While the {'PV product of the block before' if tensor == 'K' else 'QK product'} runs. "
        copy = self.kernel.load_copy(self.frame.shape(tensor)[1])
        source = self.frame.copy(copy.layout_src_tv_tiled, copy.tiler_mn, tensor, everyone=True)
        target = self.frame.copy(copy.layout_dst_tv_tiled, copy.tiler_mn, tensor, everyone=True)
        return Step(
            id=f"load_{tensor.lower()}",
            title=f"{tensor}: global → shared memory",
            kind="cp.async" if past else "st.shared",
            instruction=CP_ASYNC if past else THROUGH_REGISTERS,
            role=ALL,
            repeat="once a tile" if tensor == "Q" else "every key block",
            phase="prologue" if tensor == "Q" else "loop",
            touches=(Touch(f"g{tensor}", "read", source), Touch(f"s{tensor}", "write", target, lane_bytes=16)),
            note=f"{note}Neighbouring lanes take neighbouring 16 bytes of a row, "
            f"{'past L1 and past the registers' if past else 'through registers, so that every load is waited for'}.",
        )

    def _fetch(self, tensor: str, copy: Any, once: bool = False) -> Step:
        """ldmatrix: an operand's fragments from shared memory, once a tile or with every key block."""
        transposed = tensor == "V"
        source = self.frame.copy(copy.layout_src_tv_tiled, copy.tiler_mn, tensor, transposed)
        target = self.frame.copy(copy.layout_dst_tv_tiled, copy.tiler_mn, tensor, transposed)
        touches = (Touch(f"s{tensor}", "read", source, lane_bytes=16), Touch(f"r{tensor}", "write", target))
        note = "Lane i gives the address of a row of 8 elements; a phase is the 8 rows of one matrix."
        if transposed:
            note += " Transposed on the way: the product's k extent runs over V's rows."
        return Step(
            id=f"ldmatrix_{tensor.lower()}",
            title=f"{tensor}: shared memory → registers",
            kind="ldmatrix",
            instruction=LDMATRIX_TRANS if transposed else LDMATRIX,
            role=WARPS,
            repeat="once a tile" if once else "every key block",
            phase="prologue" if once else "loop",
            touches=touches,
            note=note,
        )

    def _block(self) -> tuple[Step, ...]:
        """The steps of one key block."""
        mma = MMA.format(ptx_type(self.problem.operands.qk_dtype))
        softmax = SoftmaxSteps(self.frame, self.of, self.problem, WARPS)
        return (
            self._product(
                "mma_qk", "S = Q K^T", mma, (self.of["Q"], "rQ"), (self.of["K"], "rK"), (self.of["S"], "acc_S")
            ),
            softmax.moving(fused=self.traits.fused_softmax),
            softmax.convert(),
            softmax.rescale("Before the PV product."),
            self._product(
                "mma_pv", "O += P V", mma, (self.of["P"], "rP"), (self.of["V"], "rV"), (self.of["O"], "acc_O")
            ),
        )

    def _product(self, id: str, title: str, mma: str, *operands: tuple[Placed, str]) -> Step:
        (a, a_id), (b, b_id), (c, c_id) = operands
        counts = (a.values.mode(1).size(), b.values.mode(1).size(), a.values.mode(2).size())
        touches = (
            a.touch(a_id, "read", counts, 0),
            b.touch(b_id, "read", counts, 0),
            c.touch(c_id, "write", counts, 0),
        )
        note = "An instruction is a tile of 16 x 8 and a k-block of 16, for all warps at once."
        return Step(id, title, "mma", mma, WARPS, "every key block", "loop", touches, note)

    def _epilogue(self) -> tuple[Step, ...]:
        stage = self.kernel.copy_o()
        store = self.kernel.store_copy(self.frame.shape("O")[1])
        pairs = self.frame.copy(stage.layout_src_tv_tiled, stage.tiler_mn, "O")
        rows = self.frame.copy(store.layout_src_tv_tiled, store.tiler_mn, "O", everyone=True)
        return (
            Step(
                "stage_o",
                "O: registers → shared memory",
                "st.shared",
                "st.shared.b32",
                ALL,
                "once a tile",
                "epilogue",
                (Touch("acc_O", "read", pairs), Touch("sO", "write", pairs, lane_bytes=4)),
                "Divided by the row sums and rounded; two neighbouring columns at a time.",
            ),
            Step(
                "read_o",
                "O: shared memory → registers",
                "ld.shared",
                "ld.shared.v4.b32",
                ALL,
                "once a tile",
                "epilogue",
                (Touch("sO", "read", rows, lane_bytes=16),),
                "So that the store below takes whole rows.",
            ),
            Step(
                "store_o",
                "O: registers → global memory",
                "st.global",
                "st.global.v4.b32",
                ALL,
                "once a tile",
                "epilogue",
                (Touch("gO", "write", rows),),
                "Rows and columns that do not exist are left out.",
            ),
        )
