//! Mixtures of experts: products of few rows with many small matrices.
//!
//! Rows are sorted by expert, and every chosen pair of row and expert is a *slot*. Two parallel
//! regions follow. The first computes the gated product; its tasks are (expert, 64 outputs). The
//! second computes `down`; a task owns some output columns and adds the experts of each row in
//! ascending id into the residual. So there are no partial sums and no atomics, and the result of a
//! row depends on that row alone.

use oscar_backend::{Gate, RouterRule, route};

use crate::buffer::Buffer;
use crate::disjoint::Disjoint;
use crate::gemm::tile::{GROUP, GROUP_BLOCKS, LANES, TILE_ROWS, Tile, XForm};
use crate::gemm::{CodedTile, Codes, ExpertMatrix, prepare_row, row_stride};
use crate::kernels::Kernels;
use crate::ops::convert::{f32_from_bf16, f32_to_bf16};
use crate::pool::ThreadPool;
use std::cell::RefCell;
use std::ops::Range;

/// The matrices of one expert.
#[derive(Debug)]
pub struct Expert {
    pub gate: ExpertMatrix,
    pub up: ExpertMatrix,
    pub down: ExpertMatrix,
    /// Of gate, up and down, where the family has them.
    pub biases: [Option<Vec<f32>>; 3],
}

impl Expert {
    pub fn bytes(&self) -> usize {
        self.gate.bytes() + self.up.bytes() + self.down.bytes()
    }
}

/// How activations go into the products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    F32,
    Bf16,
    /// The sum of two BF16: each row goes in twice, rounded and as the remainder of the rounding.
    SplitBf16,
}

/// Buffers of a step, kept from call to call.
#[derive(Debug, Default)]
pub struct ExpertScratch {
    inputs: Buffer,
    between: Buffer,
}

/// Rows of an expert that multiply codes: two strips of the kernel. For more rows it is faster to
/// expand the codes once.
const FEW_ROWS: usize = 8;

thread_local! {
    /// Weights that the tasks of this thread expand.
    static EXPANDED: RefCell<[Buffer; 2]> = RefCell::default();
}

/// The rows of each expert.
#[derive(Debug, Default)]
pub struct Slots {
    /// Row and weight of each slot, sorted by expert, then by row.
    slots: Vec<(u32, f32)>,
    /// The experts that have slots, ascending, and their slots.
    experts: Vec<(usize, Range<usize>)>,
}

impl Slots {
    /// Chooses the experts of each row of `logits`; those that are not `held` get no slots. `shared`: the
    /// weights, by row, of an expert that every row has and that comes after all others.
    pub fn route(
        pool: &ThreadPool,
        rule: &RouterRule,
        logits: &[f32],
        experts: usize,
        correction: Option<&[f32]>,
        held: Range<usize>,
        shared: Option<&[f32]>,
    ) -> Self {
        let rows = logits.len() / experts;
        let mut chosen: Vec<Vec<(u32, f32)>> = vec![Vec::new(); rows];
        pool.run_chunks(&mut chosen, 8, |index, chosen| {
            for (row, chosen) in (8 * index..).zip(chosen) {
                route(rule, &logits[row * experts..][..experts], correction, chosen);
                chosen.retain(|(expert, _)| held.contains(&(*expert as usize)));
            }
        });
        let mut starts = vec![0; experts + 1];
        chosen.iter().flatten().for_each(|&(expert, _)| starts[expert as usize + 1] += 1);
        (0..experts).for_each(|expert| starts[expert + 1] += starts[expert]);
        let mut next = starts.clone();
        let mut slots = vec![(0, 0.0); starts[experts]];
        for (row, chosen) in chosen.iter().enumerate() {
            for &(expert, weight) in chosen {
                slots[next[expert as usize]] = (row as u32, weight);
                next[expert as usize] += 1;
            }
        }
        let present =
            (0..experts).map(|e| (e, starts[e]..starts[e + 1])).filter(|(_, slots)| !slots.is_empty());
        let mut present: Vec<_> = present.collect();
        if let Some(weights) = shared.filter(|_| rows > 0) {
            present.push((experts, slots.len()..slots.len() + rows));
            slots.extend((0..rows as u32).zip(weights).map(|(row, &weight)| (row, weight)));
        }
        Self { slots, experts: present }
    }
}

/// What both regions of a step share.
pub struct ExpertStep<'a> {
    pub kernels: &'static Kernels,
    pub pool: &'a ThreadPool,
    pub activations: Activations,
    pub gate: Gate,
    /// The experts, the shared one last.
    pub experts: &'a dyn ExpertTable,
    pub slots: &'a Slots,
}

/// Experts by id.
pub trait ExpertTable: Sync {
    fn expert(&self, id: usize) -> &Expert;
}

impl ExpertStep<'_> {
    /// Rows of a product for each slot.
    fn parts(&self) -> usize {
        if self.activations == Activations::SplitBf16 { 2 } else { 1 }
    }

    fn form(&self) -> XForm {
        if self.activations == Activations::F32 { XForm::F32 } else { self.kernels.gemm.bf16_x }
    }

    /// Words between two prepared rows of a product with these matrices.
    fn stride(&self, matrices: impl Iterator<Item = usize>) -> usize {
        row_stride(matrices.max().unwrap_or(0) * self.form().words_per_step())
    }

    fn tables(&self) -> impl Iterator<Item = (&Expert, Range<usize>)> {
        self.slots.experts.iter().map(|(id, slots)| (self.experts.expert(*id), slots.clone()))
    }

    /// `x += experts(normed)`, both rows of `hidden`.
    ///
    /// # Panics
    /// If slots name rows that `x` and `normed` do not have, or an expert has another shape.
    pub fn run(&self, hidden: usize, normed: &[f32], x: &mut [f32], scratch: &mut ExpertScratch) {
        let slots = &self.slots.slots;
        if slots.is_empty() {
            return;
        }
        let parts = self.parts();
        let in_stride = self.stride(self.tables().map(|(e, _)| e.gate.steps().max(e.up.steps())));
        let between_stride = self.stride(self.tables().map(|(e, _)| e.down.steps()));
        let ExpertScratch { inputs, between } = scratch;
        inputs.reserve(slots.len() * parts * in_stride);
        between.reserve(slots.len() * parts * between_stride);
        let inputs = &mut inputs.words_mut()[..slots.len() * parts * in_stride];
        self.pool.run_chunks(inputs, parts * in_stride, |slot, words| {
            let row = slots[slot].0 as usize;
            self.prepare(&normed[row * hidden..][..hidden], words, in_stride);
        });
        let between = &mut between.words_mut()[..slots.len() * parts * between_stride];
        self.gate_and_up(Rows { words: inputs, stride: in_stride }, between, between_stride);
        self.down(hidden, Rows { words: between, stride: between_stride }, x);
    }

    /// Prepares a row, or a part of one whose words begin at those of `words`; the part of each
    /// second row begins a stride later. Zeros follow as far as the words go.
    fn prepare(&self, row: &[f32], words: &mut [u32], stride: usize) {
        if self.activations != Activations::SplitBf16 {
            return prepare_row(row, self.form(), words);
        }
        let (high, low) = words.split_at_mut(stride);
        let mut part = [0.0; GROUP];
        let per_input = self.form().words_per_step();
        for (index, chunk) in row.chunks(GROUP).enumerate() {
            // Two inputs a step.
            let first = index * GROUP / 2 * per_input;
            let end =
                if (index + 1) * GROUP >= row.len() { high.len() } else { first + GROUP / 2 * per_input };
            prepare_row(chunk, self.form(), &mut high[first..end]);
            for (part, &v) in part.iter_mut().zip(chunk) {
                *part = v - f32_from_bf16(f32_to_bf16(v));
            }
            prepare_row(&part[..chunk.len()], self.form(), &mut low[first..end]);
        }
    }

    /// Region 1: the gated product of every slot, prepared for the second product.
    fn gate_and_up(&self, x: Rows<'_>, between: &mut [u32], stride: usize) {
        let mut tasks: Vec<(usize, usize)> = Vec::new();
        for (index, (expert, _)) in self.tables().enumerate() {
            tasks.extend((0..expert.gate.outputs().div_ceil(GROUP)).map(|group| (index, group)));
        }
        // Long tasks first; the order has no influence on the numbers.
        tasks.sort_by_key(|&(index, _)| std::cmp::Reverse(self.slots.experts[index].1.len()));
        let parts = self.parts();
        let between = Disjoint::new(between);
        self.pool.run(tasks.len(), &|task| {
            let (index, group) = tasks[task];
            let (id, slots) = &self.slots.experts[index];
            let expert = self.experts.expert(*id);
            let width = expert.gate.outputs();
            let columns = group * GROUP..width.min((group + 1) * GROUP);
            let words = self.words_of(&columns, width, stride);
            EXPANDED.with_borrow_mut(|[gate_room, up_room]| {
                let (first, blocks) = (group * GROUP_BLOCKS, columns.len().div_ceil(LANES));
                let gate = self.weights(&expert.gate, first, blocks, slots.len(), gate_room);
                let up = self.weights(&expert.up, first, blocks, slots.len(), up_room);
                let mut sums = [Sums::ZERO, Sums::ZERO];
                for tile in tiles(slots, TILE_ROWS / parts) {
                    let rows = Rows { words: x.from(tile.start * parts), ..x };
                    let [gates, ups] = &mut sums;
                    self.tile(&gate, expert.gate.steps(), blocks, &rows, tile.len() * parts, gates);
                    self.tile(&up, expert.up.steps(), blocks, &rows, tile.len() * parts, ups);
                    for (row, slot) in tile.enumerate() {
                        let mut gated = [0.0; GROUP];
                        let gated = &mut gated[..columns.len()];
                        let (mut gate, mut up) = (gates.row(row, parts), ups.row(row, parts));
                        add_bias(&mut gate, &expert.biases[0], &columns);
                        add_bias(&mut up, &expert.biases[1], &columns);
                        let (gate, up) = (&gate[..columns.len()], &up[..columns.len()]);
                        self.kernels.gate_row(self.gate, gate, up, gated);
                        let place = slot * parts * stride;
                        // SAFETY: a task owns these columns of the slots of its expert; the ranges of
                        // a slot's two rows do not overlap those of other slots and columns.
                        unsafe { self.store(&between, place, stride, words.clone(), gated) };
                    }
                }
            });
        });
    }

    /// The words of these columns of a prepared row; the last ones include the padding behind them.
    fn words_of(&self, columns: &Range<usize>, width: usize, stride: usize) -> Range<usize> {
        let word = |column: usize| match self.form() {
            XForm::Bf16Pair => column / 2,
            XForm::Bf16AsF32 | XForm::F32 => column,
        };
        word(columns.start)..if columns.end == width { stride } else { word(columns.end) }
    }

    /// Prepares some columns of a slot's row, or of its two rows.
    ///
    /// # Safety
    /// No other part of these words may be alive.
    unsafe fn store(
        &self,
        to: &Disjoint<'_, u32>,
        place: usize,
        stride: usize,
        words: Range<usize>,
        values: &[f32],
    ) {
        let at = |row: usize| place + row * stride + words.start..place + row * stride + words.end;
        // SAFETY: as the caller vouches.
        prepare_row(values, self.form(), unsafe { to.part(at(0)) });
        if self.activations == Activations::SplitBf16 {
            let mut low = [0.0; GROUP];
            for (low, &v) in low.iter_mut().zip(values) {
                *low = v - f32_from_bf16(f32_to_bf16(v));
            }
            // SAFETY: as the caller vouches.
            prepare_row(&low[..values.len()], self.form(), unsafe { to.part(at(1)) });
        }
    }

    /// Region 2: adds every row's experts to it.
    fn down(&self, hidden: usize, between: Rows<'_>, x: &mut [f32]) {
        let parts = self.parts();
        let all = hidden.div_ceil(LANES);
        // As many blocks as a kernel takes, or fewer if threads would have nothing to do.
        let blocks = (all.div_ceil(self.pool.threads())).clamp(1, GROUP_BLOCKS);
        let slots = &self.slots.slots;
        let x = Disjoint::new(x);
        self.pool.run(all.div_ceil(blocks), &|task| {
            let first = task * blocks;
            let blocks = blocks.min(all - first);
            let columns = first * LANES..hidden.min((first + blocks) * LANES);
            EXPANDED.with_borrow_mut(|[room, _]| {
                let mut sums = Sums::ZERO;
                for (expert, of_expert) in self.tables() {
                    let weights = self.weights(&expert.down, first, blocks, of_expert.len(), room);
                    for tile in tiles(&of_expert, TILE_ROWS / parts) {
                        let rows = Rows { words: between.from(tile.start * parts), ..between };
                        self.tile(
                            &weights,
                            expert.down.steps(),
                            blocks,
                            &rows,
                            tile.len() * parts,
                            &mut sums,
                        );
                        for (index, slot) in tile.enumerate() {
                            let (row, weight) = slots[slot];
                            let start = row as usize * hidden;
                            // SAFETY: a task owns these columns of all rows.
                            let x = unsafe { x.part(start + columns.start..start + columns.end) };
                            let mut sum = sums.row(index, parts);
                            add_bias(&mut sum, &expert.biases[2], &columns);
                            x.iter_mut().zip(&sum).for_each(|(x, sum)| *x += weight * sum);
                        }
                    }
                }
            });
        });
    }

    /// Some blocks of a matrix for the products of `slots` slots. A few rows read codes as they are.
    fn weights<'a>(
        &self,
        matrix: &'a ExpertMatrix,
        first: usize,
        blocks: usize,
        slots: usize,
        room: &'a mut Buffer,
    ) -> WeightBlocks<'a> {
        let few = slots * self.parts() <= FEW_ROWS && blocks == GROUP_BLOCKS;
        let kernel = self.kernels.gemm.coded.filter(|_| few);
        match kernel.zip(matrix.codes(first)) {
            Some((kernel, codes)) => WeightBlocks::Codes(kernel, codes),
            None => WeightBlocks::Words(matrix.words(self.kernels, first, blocks, room)),
        }
    }

    /// The sums of some rows with some blocks.
    fn tile(
        &self,
        weights: &WeightBlocks<'_>,
        steps: usize,
        blocks: usize,
        x: &Rows<'_>,
        rows: usize,
        sums: &mut Sums,
    ) {
        let (x_stride, x, sums) = (x.stride, x.words, &mut sums.0);
        let weights = match *weights {
            WeightBlocks::Words(words) => words,
            WeightBlocks::Codes(kernel, weights) => {
                // SAFETY: `Kernels` exist only for variants this processor can run.
                return unsafe { kernel(&mut CodedTile { weights, steps, x, x_stride, rows, sums }) };
            }
        };
        let kernel = match self.activations {
            Activations::F32 => self.kernels.gemm.f32,
            Activations::Bf16 | Activations::SplitBf16 => self.kernels.gemm.bf16,
        };
        let mut tile = Tile { weights, blocks, steps, x, x_stride, rows, sums };
        // SAFETY: `Kernels` exist only for variants this processor can run.
        unsafe { kernel(&mut tile) };
    }
}

/// Weights as a kernel takes them.
enum WeightBlocks<'a> {
    Words(&'a [u32]),
    Codes(unsafe fn(&mut CodedTile<'_>), Codes<'a>),
}

/// Adds these columns of a bias to sums.
fn add_bias(sums: &mut [f32; GROUP], bias: &Option<Vec<f32>>, columns: &Range<usize>) {
    if let Some(bias) = bias {
        sums.iter_mut().zip(&bias[columns.clone()]).for_each(|(sum, bias)| *sum += bias);
    }
}

/// Prepared rows.
#[derive(Clone, Copy)]
struct Rows<'a> {
    words: &'a [u32],
    stride: usize,
}

impl<'a> Rows<'a> {
    fn from(&self, row: usize) -> &'a [u32] {
        &self.words[row * self.stride..]
    }
}

/// Ranges of up to `most` slots.
fn tiles(slots: &Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = slots.end;
    slots.clone().step_by(most).map(move |first| first..end.min(first + most))
}

/// The sums of one tile, aligned for the stores of the kernels.
#[repr(align(64))]
struct Sums([f32; TILE_ROWS * GROUP]);

impl Sums {
    const ZERO: Self = Self([0.0; TILE_ROWS * GROUP]);

    /// The sums of a slot, of one row or of both its parts.
    fn row(&self, slot: usize, parts: usize) -> [f32; GROUP] {
        let at = |row: usize| &self.0[row * GROUP..][..GROUP];
        match parts {
            1 => std::array::from_fn(|i| at(slot)[i]),
            _ => {
                let (high, low) = (at(2 * slot), at(2 * slot + 1));
                std::array::from_fn(|i| high[i] + low[i])
            }
        }
    }
}
