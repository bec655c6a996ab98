"""The scene of an sm90 row: TMA, WGMMA, one producer and its consumers, read from the kernel's own objects."""

from __future__ import annotations

from typing import Any

from cuteflash.problem import FwdProblem
from cuteflash.traits.sm90 import WARPGROUP, WGMMA_K, WGMMA_M

from .algebra import Layout, concatenate
from .dsl import coordinates, plain
from .read import (
    ELEMENT_BYTES,
    EXAMPLE_HEADS,
    Frame,
    Operand,
    Placed,
    global_tile,
    no_launch,
    products,
    ptx_type,
    shared_tile,
    smem_start,
)
from .scene import Descriptor, Fragment, Role, Step, Tile, Touch
from .softmax_steps import SoftmaxSteps

TMA_LOAD = "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
TMA_STORE = "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group"
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
STMATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16"
WGMMA = "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype}"
CONSUMERS = "every consumer warp"
WARPGROUPS = "every consumer warpgroup"
UNIT = 16  # bytes that descriptors count in
CORE_ROWS = 8  # a core matrix is 8 rows of 16 bytes
CORE_COLS = UNIT // ELEMENT_BYTES
EXAMPLE_TOKENS = 4096


class ReaderSm90:
    """Reads one sm90 kernel; make and use it inside `layouts.dsl.context`."""

    def __init__(self, kernel: Any) -> None:
        from cuteflash.kernels.sm90.warpgroup import make_warpgroup

        self.kernel, self.traits = kernel, kernel.traits
        self.problem: FwdProblem = kernel.problem
        t = self.traits
        sizes = {"m": t.tile_m, "n": t.tile_n, "d": t.head_dim, "e": t.head_dim_v}
        self.frame = Frame(sizes, t.mma_warpgroups, t.first_consumer, WARPGROUP)  # type: ignore[arg-type]
        self.smem = kernel.make_tiles(smem_start())
        self.warpgroup = make_warpgroup(kernel, self.smem, no_launch(1))
        self.of = products(self.frame, kernel)

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
        problem, kernel, plan = self.problem, self.kernel, self.traits.smem_plan
        share = "O is staged in Q's memory; the next Q waits for its store." if self.traits.share_q_o else ""
        ahead = "The next tile's Q loads into the other stage." if self.traits.q_stage > 1 else ""
        parts = self.traits.mma_warpgroups
        shared = [
            shared_tile("Q", kernel.smem_layout_q(), plan["q"].start, True, share or ahead, parts),
            shared_tile("K", kernel.smem_layout_k(), plan["k"].start, True, ""),
            shared_tile("V", kernel.smem_layout_v(), plan["v"].start, True, "Rows are keys: the product's k extent."),
            shared_tile("O", kernel.smem_layout_o(), plan["o"].start, True, share, parts),
        ]
        if not self.traits.p_in_regs:
            shared.insert(2, shared_tile("P", kernel.smem_layout_p(), plan["p"].start, True, "", parts))
        return (
            global_tile(self.frame, "Q", problem.operands.head_dim, "A block's queries of one head."),
            global_tile(self.frame, "K", problem.operands.head_dim, "One block of keys."),
            global_tile(self.frame, "V", problem.operands.head_dim_v, "One block of values."),
            global_tile(self.frame, "O", problem.operands.head_dim_v, "The block's output."),
            *shared,
        )

    def fragments(self) -> tuple[Fragment, ...]:
        """Operands and accumulators in registers; products read other operands from shared memory."""
        wg, make = self.warpgroup, self.frame.fragment
        found = [
            make("acc_S", "S", self.of["S"], wg.acc_S, "Four neighbouring lanes hold a row together."),
            make("acc_O", "O", self.of["O"], wg.acc_O, "Stays for the whole tile."),
        ]
        if self.traits.p_in_regs:
            note = "The S accumulators, rounded: already in the threads that need them for A of the next product."
            found.insert(1, make("rP", "P", self.of["P"], wg.tOrP, note))
        if self.traits.q_in_regs:
            found.insert(
                0,
                make(
                    "rQ",
                    "Q",
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
        load_q = self._transfer("Q", tma.load_q, tma.gQ, "Once for each warpgroup.")
        load_k, load_v = self._transfer("K", tma.load_k, tma.gK, ahead), self._transfer("V", tma.load_v, tma.gV, ahead)
        store_o = self._transfer("O", tma.store_o, tma.gO, "Clipped to the rows that exist.")
        fetch = (self._fetch_q(),) if self.traits.q_in_regs else ()
        qk, pv = self._products()
        stage_o = self._stage("O", self.kernel.copy_o())
        return (load_q, *fetch, load_k, qk, *self._softmax(), load_v, pv, stage_o, store_o)

    def _tma(self) -> Any:
        """The kernel's TMA atoms over example tensors."""
        import cutlass.cute as cute

        def example(head_dim: int) -> Any:
            shape = (1, EXAMPLE_TOKENS, EXAMPLE_HEADS, head_dim)
            stride = (EXAMPLE_TOKENS * EXAMPLE_HEADS * head_dim, EXAMPLE_HEADS * head_dim, head_dim, 1)
            start = cute.make_ptr(self.kernel.dtype, 0, cute.AddressSpace.gmem, assumed_align=16)
            return cute.make_tensor(start, cute.make_layout(shape, stride=stride))

        wide, narrow = self.problem.operands.head_dim, self.problem.operands.head_dim_v
        return self.kernel.make_tma(example(wide), example(wide), example(narrow), example(narrow))

    def _transfer(self, tensor: str, atom: Any, coords: Any, note: str) -> Step:
        """A TMA load or store: its instructions are boxes, as wide as the swizzle."""
        import cutlass.cute as cute

        from cuteflash.atoms.sm90 import tma_partition

        rows, cols = self.frame.part(tensor)
        smem = {"Q": self.smem.sQ, "K": self.smem.sK, "V": self.smem.sV, "O": self.smem.sO}[tensor]
        boxes = cute.local_tile(coords[None, None, 0, 0], (rows, cols), (None, 0))
        _, partition = tma_partition(atom, smem, boxes)
        step = self.frame.shape(tensor)[0]
        # TMA counts coordinates from the contiguous one: 0 is the column, 1 the row.
        box, slabs = coordinates(partition.layout, (step, 1, 0, 0)).mode(0).modes()
        parts = Layout(step // rows, rows if step > rows else 0)
        if tensor == "O":  # every warpgroup stores its own rows
            first_thread, tv = self.frame.first_thread, concatenate(self.warpgroups("O"), box, slabs)
        else:
            first_thread, tv = 0, concatenate(Layout(1, 0), box, concatenate(slabs, parts))
        is_load, once = tensor != "O", tensor in ("Q", "O")
        source, target = (f"g{tensor}", f"s{tensor}") if is_load else (f"s{tensor}", f"g{tensor}")
        return Step(
            id=f"{'load' if is_load else 'store'}_{tensor.lower()}",
            title=f"{tensor}: " + ("global → shared memory" if is_load else "shared memory → global"),
            kind="tma",
            instruction=TMA_LOAD if is_load else TMA_STORE,
            role=self._loader() if is_load else "warp 0 of every consumer warpgroup",
            repeat="once a tile" if once else "every key block",
            phase="epilogue" if not is_load else "prologue" if once else "loop",
            touches=(Touch(source, "read", tv, first_thread), Touch(target, "write", tv, first_thread)),
            note=f"An instruction moves one box; the TMA unit applies the swizzle. {note}",
            box=(rows, box.size() // rows),
        )

    def _loader(self) -> str:
        return "one thread of the producer warp" if self.traits.warp_specialized else "one thread of consumer 0"

    def _fetch_q(self) -> Step:
        copy = self.kernel.copy_q()
        source = self.frame.copy(copy.layout_src_tv_tiled, copy.tiler_mn, "Q")
        target = self.frame.copy(copy.layout_dst_tv_tiled, copy.tiler_mn, "Q")
        touches = (
            Touch("sQ", "read", source, self.frame.first_thread, lane_bytes=16),
            Touch("rQ", "write", target, self.frame.first_thread),
        )
        note = "Lane i gives the address of a row of 8 elements; a phase is the 8 rows of one matrix."
        return Step(
            "ldmatrix_q",
            "Q: shared memory → registers",
            "ldmatrix",
            LDMATRIX,
            CONSUMERS,
            "once a tile",
            "prologue",
            touches,
            note,
        )

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
        s, o = (self.of["S"], "acc_S"), (self.of["O"], "acc_O")
        return (
            self._product("wgmma_qk", "S = Q K^T", (self.of["Q"], "Q"), (self.of["K"], "K"), s, f"{before}."),
            self._product("wgmma_pv", "O += P V", (self.of["P"], "P"), (self.of["V"], "V"), o, f"{after}."),
        )

    def _softmax(self) -> tuple[Step, ...]:
        """The steps that turn the scores of a block into P and rescale O to the new maxima."""
        traits = self.traits
        softmax = SoftmaxSteps(self.frame, self.of, self.problem, CONSUMERS, traits.fixed_max)
        hand_over = softmax.convert() if traits.p_in_regs else self._stage("P", self.kernel.copy_p())
        between = "After the next QK product has been issued and before the PV product is."
        steps = [
            softmax.moving(early_rows=traits.exp_rows_before_wait if traits.overlap else None),
            hand_over,
            softmax.rescale(between if traits.rescale_in_product else "Before the PV product is issued."),
        ]
        if traits.fixed_max:
            steps += [softmax.fixed(traits.exp_rows_before_wait), softmax.repair()]
        return tuple(steps)

    def _stage(self, tensor: str, copy: Any) -> Step:
        """Accumulators to shared memory by stmatrix."""
        source = self.frame.copy(copy.layout_src_tv_tiled, copy.tiler_mn, tensor)
        target = self.frame.copy(copy.layout_dst_tv_tiled, copy.tiler_mn, tensor)
        acc = "acc_S" if tensor == "P" else "acc_O"
        note = "Lane i gives the address of a row of 8 elements; a phase is the 8 rows of one matrix."
        if tensor == "O":
            note = f"Divided by the row sums and rounded. {note}"
        touches = (
            Touch(acc, "read", source, self.frame.first_thread),
            Touch(f"s{tensor}", "write", target, self.frame.first_thread, lane_bytes=16),
        )
        once = tensor == "O"
        return Step(
            f"stmatrix_{tensor.lower()}",
            f"{tensor}: registers → shared memory",
            "stmatrix",
            STMATRIX,
            CONSUMERS,
            "once a tile" if once else "every key block",
            "epilogue" if once else "loop",
            touches,
            note,
        )

    def _product(
        self, id: str, title: str, a: tuple[Placed, str], b: tuple[Placed, str], c: tuple[Placed, str], note: str
    ) -> Step:
        """A WGMMA: an instruction is one k-block of 16."""
        k_blocks = a[0].values.mode(2).size()
        counts = (1, 1, k_blocks)
        in_regs = {"Q": self.traits.q_in_regs, "P": self.traits.p_in_regs}[a[1]]
        touches = [
            a[0].touch(f"r{a[1]}", "read", counts, self.frame.first_thread)
            if in_regs
            else self._from_shared(*a, counts),
            self._from_shared(*b, counts),
            c[0].touch(c[1], "write", counts, self.frame.first_thread),
        ]
        n = self.frame.shape(b[1])[0 if b[1] == "K" else 1]
        return Step(
            id=id,
            title=title,
            kind="wgmma",
            instruction=WGMMA.format(n=n, dtype=ptx_type(self.problem.operands.qk_dtype)),
            role=WARPGROUPS,
            repeat="every key block",
            phase="loop",
            touches=tuple(touches),
            note=f"An instruction is one k-block of 16. {note}".strip(),
            descriptor={"a": None if in_regs else self._descriptor(a[1], "A"), "b": self._descriptor(b[1], "B")},
        )

    def _from_shared(self, placed: Placed, tensor: str, counts: tuple[int, int, int]) -> Touch:
        """An operand that the product reads from shared memory: the warpgroup reads it, not single threads."""
        whole = placed.touch(f"s{tensor}", "read", counts, self.frame.first_thread).tv
        return Touch(
            f"s{tensor}",
            "read",
            concatenate(self.warpgroups(tensor), whole.mode(1), whole.mode(2)),
            self.frame.first_thread,
        )

    def warpgroups(self, tensor: str) -> Layout:
        """A thread mode in which a warpgroup's threads all name the first element of its rows."""
        return self.frame.all_groups(Layout(WARPGROUP, 0), tensor)

    def _descriptor(self, tensor: str, operand: Operand) -> Descriptor:
        """The matrix descriptor of an operand: starts from the kernel's own fragment, offsets from its layout.

        Canonical layouts of swizzled operands, PTX ISA "Asynchronous warpgroup level matrix instructions": 8 rows of
        one swizzle width are an atom; K-major, atoms follow each other along M or N by the stride offset; MN-major,
        along K by the stride offset and along M or N by the leading one.
        """
        wg = self.warpgroup
        views = {"Q": wg.tSrQ, "K": wg.tSrK, "P": wg.tOrP, "V": wg.tOrV}
        tile = next(tile for tile in self.tiles() if tile.id == f"s{tensor}")
        k_mode = plain(views[tensor].layout).mode(2)
        assert tile.swizzle is not None
        width = UNIT << tile.swizzle.bits
        rows, cols = (mode for mode in tile.layout.modes()[:2])
        atom_step = rows.flat_modes()[1][1] if len(rows.flat_modes()) > 1 else 0
        slabs = [(count, step) for count, step in cols.flat_modes()[1:] if count > 1]
        major = "MN" if tensor == "V" else "K"
        leading = slabs[0][1] * ELEMENT_BYTES if major == "MN" and slabs else UNIT
        return Descriptor(
            tile=tile.id,
            major=major,  # type: ignore[arg-type]
            swizzle_bytes=width,
            leading_bytes=leading,
            stride_bytes=atom_step * ELEMENT_BYTES,
            starts=tuple(int(start) * UNIT for start in k_mode.indices()),
            core=self._core_matrices(tensor, operand),
        )

    def _core_matrices(self, tensor: str, operand: Operand) -> Layout:
        """(row, element, core matrix) to element of the tile, of the first instruction and warpgroup."""
        step = self.frame.shape(tensor)[0]
        if tensor == "V":
            rows, cols = WGMMA_K, self.frame.shape("V")[1]
        else:
            rows, cols = (WGMMA_M if operand == "A" else step), WGMMA_K
        down = Layout(rows // CORE_ROWS, CORE_ROWS)
        across = Layout(cols // CORE_COLS, CORE_COLS * step)
        return concatenate(Layout(CORE_ROWS, 1), Layout(CORE_COLS, step), concatenate(down, across))
