//! `skinny_gemm.cu`: the choice of a variant, the division of a matrix among blocks, the launch.

use super::CudaMatrix;
use crate::device::{Device, Function, LaunchShape};
use crate::error::{CudaError, Result};
use crate::kernels::Kernels;
use crate::layout::shared_struct;
use crate::memory::{DevicePtr, DeviceSlice};
use crate::sources::{SKINNY_GEMM, weight_defines};
use oscar_backend::WeightFormat;
use std::cmp::Reverse;
use std::ffi::CStr;

/// Most rows that the kernel takes.
pub(crate) const MOST_ROWS: usize = 16;

/// A variant: most rows, warps per block, tiles of 8 outputs per unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SkinnyShape {
    pub rows: usize,
    pub warps: usize,
    pub tiles: usize,
}

/// The division of a matrix into units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// Outputs of a unit; gates only, if gated.
    unit: usize,
    /// Outputs of the last units, one for each block, and the number of units before them.
    last_unit: usize,
    large_units: usize,
    units: usize,
}

shared_struct! {
    pub(super) struct SkinnyParams {
        weights: DevicePtr<u8>,
        scales: Option<DevicePtr<f32>>,
        x: DevicePtr<f32>,
        out: DevicePtr<f32>,
        bias: Option<DevicePtr<f32>>,
        norm: Option<DevicePtr<f32>>,
        rows: u32,
        outputs: u32,
        inputs: u32,
        add: u32,
        gated: u32,
        eps: f32,
        unit: u32,
        last_unit: u32,
        large_units: u32,
        units: u32,
    }
}

/// A variant's kernels: without and with a norm.
#[derive(Clone, Copy)]
struct Pair {
    shape: SkinnyShape,
    plain: Function,
    normed: Function,
}

/// The variants that fit the GPU, for weights in one format.
pub(crate) struct Skinny {
    device: Device,
    format: WeightFormat,
    pairs: Vec<Pair>,
}

/// A variant of `skinny_gemm.cu`.
struct Variant {
    shape: SkinnyShape,
    /// Its kernels, without and with a norm, for BF16 and for FP8 weights.
    bf16: [&'static CStr; 2],
    fp8: [&'static CStr; 2],
    /// Whether it exists for BF16.
    has_bf16: bool,
}

macro_rules! variant {
    ($rows:literal, $warps:literal, $tiles:literal, bf16: $has_bf16:literal) => {
        Variant {
            shape: SkinnyShape { rows: $rows, warps: $warps, tiles: $tiles },
            bf16: [variant!(@ "skinny_", $rows, $warps, $tiles), variant!(@ "skinny_norm_", $rows, $warps, $tiles)],
            fp8: [
                variant!(@ "skinny_fp8_", $rows, $warps, $tiles),
                variant!(@ "skinny_fp8_norm_", $rows, $warps, $tiles),
            ],
            has_bf16: $has_bf16,
        }
    };
    (@ $prefix:literal, $rows:literal, $warps:literal, $tiles:literal) => {
        c_name(concat!($prefix, $rows, "_", $warps, "_", $tiles, "\0"))
    };
}

const fn c_name(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("a name ends with its only zero"),
    }
}

const VARIANTS: [Variant; 8] = [
    variant!(8, 16, 4, bf16: true),
    variant!(8, 16, 3, bf16: true),
    variant!(16, 16, 4, bf16: true),
    variant!(16, 16, 3, bf16: true),
    variant!(8, 8, 4, bf16: true),
    variant!(16, 8, 4, bf16: true),
    variant!(8, 8, 8, bf16: false),
    variant!(16, 8, 8, bf16: false),
];

impl Variant {
    fn names(&self, format: WeightFormat) -> Option<[&'static CStr; 2]> {
        match format {
            WeightFormat::Bf16 => self.has_bf16.then_some(self.bf16),
            WeightFormat::Fp8 => Some(self.fp8),
        }
    }
}

impl SkinnyShape {
    /// Dynamic shared memory: the lanes' slots and the sums of two units.
    fn shared(self) -> usize {
        self.warps * self.tiles * (self.slots() * 512 + 2 * 64 * 4 * (self.rows / 8))
    }

    /// Most outputs of a unit.
    fn room(self, gated: bool) -> usize {
        if gated { 4 * self.tiles } else { 8 * self.tiles }
    }

    /// Divides a matrix so that all blocks have the same amount of work, in as few rounds as
    /// possible: units of one size, and in the last round equal parts of the rest.
    fn cut(self, format: WeightFormat, outputs: usize, gated: bool, blocks: usize) -> Cut {
        let width = if gated { outputs / 2 } else { outputs };
        let sized = |outputs: usize| match format {
            WeightFormat::Bf16 => outputs.max(8),
            // Outputs of a tile share a scale.
            WeightFormat::Fp8 => outputs.next_multiple_of(8),
        };
        let rounds = width.div_ceil(blocks * self.room(gated));
        let unit = sized(width.div_ceil(blocks * rounds));
        let large_units = (rounds - 1) * blocks;
        let left = width - large_units * unit;
        let last_unit = sized(left.div_ceil(blocks));
        Cut { unit, last_unit, large_units, units: large_units + left.div_ceil(last_unit) }
    }

    /// Estimated duration of a product, in rows of weights: those of the busiest block, plus its
    /// passes over the inputs. Then the number of rounds.
    fn duration(self, format: WeightFormat, cut: Cut, gated: bool, blocks: usize) -> (usize, usize) {
        // Loading and splitting the inputs is hidden behind BF16 weights, but not behind FP8
        // weights, which take half the time (H200, matrices of Qwen3-8B).
        let pass = match format {
            WeightFormat::Bf16 => 0,
            WeightFormat::Fp8 => 24,
        };
        let rounds = cut.large_units / blocks + 1;
        let outputs = cut.large_units / blocks * cut.unit + cut.last_unit;
        (outputs * if gated { 2 } else { 1 } + rounds * pass, rounds)
    }

    /// Slots of a lane: `SLOTS_OF` of `skinny_gemm.cu`.
    fn slots(self) -> usize {
        if self.tiles == 3 { 4 } else { 3 }
    }

    /// Whether it fits, with the static shared memory for the squares of a norm.
    fn fits(self, shared_memory: usize) -> bool {
        self.shared() + self.warps * self.rows * 4 <= shared_memory
    }
}

impl Skinny {
    pub fn new(device: &Device, kernels: &Kernels, format: WeightFormat) -> Result<Self> {
        let room = device.properties().shared_memory as usize;
        let defines = weight_defines(format);
        let mut pairs = Vec::new();
        for variant in VARIANTS.iter().filter(|v| v.shape.fits(room)) {
            let Some([plain, normed]) = variant.names(format) else { continue };
            let shape = variant.shape;
            let function = |name| kernels.function(&SKINNY_GEMM, &defines, name, shape.shared());
            pairs.push(Pair { shape, plain: function(plain)?, normed: function(normed)? });
        }
        Ok(Self { device: device.clone(), format, pairs })
    }

    /// Whether the kernel takes this product.
    pub fn takes(matrix: &CudaMatrix, rows: usize) -> bool {
        rows <= MOST_ROWS && Self::multiplies(matrix.format(), matrix.outputs, matrix.inputs)
    }

    /// Whether the kernel takes matrices of this shape.
    pub fn multiplies(format: WeightFormat, outputs: usize, inputs: usize) -> bool {
        // Inputs: `CHUNK` of `skinny_gemm.cu`.
        match format {
            WeightFormat::Bf16 => inputs.is_multiple_of(32) && outputs.is_multiple_of(8),
            WeightFormat::Fp8 => oscar_backend::fp8_multiplied(outputs, inputs),
        }
    }

    /// Whether the kernel can gate products with this matrix.
    pub fn gates(matrix: &CudaMatrix) -> bool {
        // Units of four or eight tiles, half of which are gates.
        matrix.outputs.is_multiple_of(64)
    }

    /// The variants for `rows` rows.
    pub fn shapes(&self, rows: usize) -> impl Iterator<Item = SkinnyShape> {
        let capacity = if rows <= 8 { 8 } else { MOST_ROWS };
        self.pairs.iter().map(|p| p.shape).filter(move |s| s.rows == capacity)
    }

    /// The variant with the shortest estimated duration; of several the one with the fewest rounds,
    /// then the one with most weights in flight.
    pub fn choose(&self, rows: usize, outputs: usize, gated: bool) -> Option<SkinnyShape> {
        choose(self.format, self.shapes(rows), outputs, gated, self.blocks())
    }

    fn blocks(&self) -> usize {
        self.device.properties().multiprocessors as usize
    }

    pub fn enqueue(&self, matrix: &CudaMatrix, product: &SkinnyProduct<'_>) -> Result<()> {
        let Some(shape) = self.choose(product.rows, matrix.outputs, product.gated) else {
            let detail = "the GPU has too little shared memory per block".into();
            return Err(CudaError::Shape { what: "a skinny product", detail });
        };
        self.enqueue_as(shape, matrix, product)
    }

    /// [`Skinny::enqueue`] with a variant of [`Skinny::shapes`].
    pub fn enqueue_as(
        &self,
        shape: SkinnyShape,
        matrix: &CudaMatrix,
        product: &SkinnyProduct<'_>,
    ) -> Result<()> {
        let refuse = |detail: String| CudaError::Shape { what: "a product of few rows", detail };
        let Some(pair) = self.pairs.iter().find(|p| p.shape == shape) else {
            return Err(refuse(format!("{shape:?} is no variant of the kernel")));
        };
        product.check(matrix, shape, self.format).map_err(refuse)?;
        let cut = shape.cut(self.format, matrix.outputs, product.gated, self.blocks());
        let params = SkinnyParams {
            weights: matrix.weights.ptr(),
            scales: matrix.scales.as_ref().map(|s| s.ptr()),
            x: product.x.ptr(),
            out: product.out.ptr(),
            bias: matrix.bias.as_ref().map(|b| b.ptr()),
            norm: product.norm.map(|(norm, _)| norm.ptr()),
            rows: product.rows as u32,
            outputs: matrix.outputs as u32,
            inputs: matrix.inputs as u32,
            add: product.add as u32,
            gated: product.gated as u32,
            eps: product.norm.map_or(0.0, |(_, eps)| eps),
            unit: cut.unit as u32,
            last_unit: cut.last_unit as u32,
            large_units: cut.large_units as u32,
            units: cut.units as u32,
        };
        let blocks = cut.units.min(self.blocks());
        let launch = LaunchShape::new(blocks, shape.warps as u32 * 32).shared(shape.shared()).overlapping();
        let function = if product.norm.is_some() { pair.normed } else { pair.plain };
        // SAFETY: the parameters of `skinny_gemm.cu`; operands have the sizes of the product
        // (checked).
        unsafe { self.device.launch(function, launch, params) }
    }
}

fn choose(
    format: WeightFormat,
    shapes: impl Iterator<Item = SkinnyShape>,
    outputs: usize,
    gated: bool,
    blocks: usize,
) -> Option<SkinnyShape> {
    shapes.filter(|s| !gated || s.tiles.is_multiple_of(2)).min_by_key(|s| {
        let cut = s.cut(format, outputs, gated, blocks);
        let on_their_way = (s.slots() - 1) * s.warps * cut.unit.min(outputs.div_ceil(blocks));
        (s.duration(format, cut, gated, blocks), Reverse(on_their_way), Reverse(s.warps))
    })
}

/// `out ← x · wᵀ + bias`, optionally with a norm before it and a gate behind it.
#[derive(Clone, Copy)]
pub(crate) struct SkinnyProduct<'a> {
    pub rows: usize,
    pub x: DeviceSlice<'a, f32>,
    pub out: DeviceSlice<'a, f32>,
    /// RMSNorm of `x`: its weights and epsilon.
    pub norm: Option<(DeviceSlice<'a, f32>, f32)>,
    /// Adds to `out`.
    pub add: bool,
    /// The matrix makes `[gate | up]` and `out` receives `silu(gate) · up`.
    pub gated: bool,
}

impl SkinnyProduct<'_> {
    /// Refuses a product that the kernel does not take, or whose operands are too short.
    fn check(
        &self,
        matrix: &CudaMatrix,
        shape: SkinnyShape,
        format: WeightFormat,
    ) -> std::result::Result<(), String> {
        let Self { rows, x, out, norm, gated, .. } = *self;
        let width = if gated { matrix.outputs / 2 } else { matrix.outputs };
        let takes = matrix.format() == format
            && rows > 0
            && rows <= shape.rows
            && Skinny::takes(matrix, rows)
            && (!gated || Skinny::gates(matrix) && shape.tiles.is_multiple_of(2));
        let fits = rows * matrix.inputs <= x.len()
            && rows * width <= out.len()
            && norm.is_none_or(|(norm, _)| matrix.inputs <= norm.len());
        match takes && fits {
            true => Ok(()),
            false => Err(format!(
                "{rows} rows by {} × {} {:?} with {shape:?} of {format:?}, gated {gated}, {} inputs, {} outputs",
                matrix.outputs,
                matrix.inputs,
                matrix.format(),
                x.len(),
                out.len()
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fitting(format: WeightFormat, rows: usize, room: usize) -> impl Iterator<Item = SkinnyShape> {
        let there = VARIANTS.iter().filter(move |v| v.names(format).is_some()).map(|v| v.shape);
        there.filter(move |s| s.rows == rows && s.fits(room))
    }

    #[test]
    fn every_supported_gpu_has_room_for_a_variant_of_every_size() {
        for format in [WeightFormat::Bf16, WeightFormat::Fp8] {
            // Shared memory per block on sm_80, sm_89 and sm_90.
            for (room, warps) in [(163 << 10, 16), (99 << 10, 8), (227 << 10, 16)] {
                for rows in [8, MOST_ROWS] {
                    for gated in [false, true] {
                        let chosen = choose(format, fitting(format, rows, room), 4096, gated, 128).unwrap();
                        assert_eq!((chosen.warps, chosen.rows), (warps, rows), "{room} bytes");
                    }
                }
            }
        }
        // More than half of a multiprocessor, so that two blocks never share one.
        for v in VARIANTS.iter().filter(|v| v.shape.warps * v.shape.tiles >= 48) {
            assert!(v.shape.shared() > 114 << 10, "{:?}", v.shape);
        }
    }

    #[test]
    fn variants_are_called_what_the_kernels_are() {
        let names = VARIANTS[1].names(WeightFormat::Fp8).unwrap();
        assert_eq!(names, [c"skinny_fp8_8_16_3", c"skinny_fp8_norm_8_16_3"]);
        assert_eq!(VARIANTS[0].names(WeightFormat::Bf16).unwrap(), [c"skinny_8_16_4", c"skinny_norm_8_16_4"]);
    }

    #[test]
    fn matrices_are_cut_so_that_the_busiest_block_has_least_to_do() {
        let chosen = |format, outputs, gated| {
            let shape = choose(format, fitting(format, 8, 227 << 10), outputs, gated, 132).unwrap();
            let cut = shape.cut(format, outputs, gated, 132);
            (shape.warps, shape.tiles, cut.unit, cut.last_unit, cut.units)
        };
        // Qwen3-8B and 4B: each block has 1/132 of the outputs, or hardly more.
        let bf16 = |outputs| chosen(WeightFormat::Bf16, outputs, false);
        assert_eq!(
            [bf16(4096), bf16(6144), bf16(2560)],
            [(16, 4, 32, 32, 128), (16, 3, 24, 23, 132 + 130), (16, 3, 20, 20, 128)]
        );
        let gated = |outputs| chosen(WeightFormat::Bf16, outputs, true);
        assert_eq!(
            [gated(24576), gated(19456)],
            [(16, 4, 16, 14, 5 * 132 + 124), (16, 4, 15, 14, 4 * 132 + 130)]
        );
        assert_eq!(bf16(151_936), (16, 4, 32, 32, 35 * 132 + 128));
        // Small matrices: units of eight at least.
        assert_eq!([bf16(8), bf16(136)].map(|c| (c.3, c.4)), [(8, 1), (8, 17)]);
        // FP8: whole tiles, and passes over the inputs count.
        let fp8 = |outputs, gated| chosen(WeightFormat::Fp8, outputs, gated);
        assert_eq!([fp8(4096, false).1, fp8(6144, false).1, fp8(24576, true).1], [4, 8, 8]);
    }

    #[test]
    fn every_output_is_in_one_unit() {
        for format in [WeightFormat::Bf16, WeightFormat::Fp8] {
            for outputs in (64..9000).step_by(64) {
                for gated in [false, true] {
                    for shape in fitting(format, 8, 227 << 10).filter(|s| !gated || s.tiles % 2 == 0) {
                        let cut = shape.cut(format, outputs, gated, 132);
                        let width = if gated { outputs / 2 } else { outputs };
                        let what = format!("{shape:?} {outputs} {cut:?}");
                        assert!(cut.last_unit <= cut.unit && cut.unit <= shape.room(gated), "{what}");
                        assert!(cut.units <= cut.large_units + 132, "{what}");
                        let before_last =
                            cut.large_units * cut.unit + (cut.units - cut.large_units - 1) * cut.last_unit;
                        assert!(before_last < width && before_last + cut.last_unit >= width, "{what}");
                    }
                }
            }
        }
    }
}
