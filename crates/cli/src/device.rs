//! The device a command runs on, chosen at start: one type for all of them, so that commands need not be generic.

use anyhow::{Context, Result};
use oscar_backend::{
    Backend, BackendError, CacheHead, Candidate, HeadPreparation, HeadShape, HostMatrix, Pick,
    Result as BackendResult, SequenceRows, WeightFormat, Write,
};
use oscar_codec::{CacheLayout, CodeLayout, FullPageId, HeadRotations};
use oscar_kernels_cpu::backend::CpuBackend;
use oscar_kernels_cpu::bandwidth;
use oscar_kernels_cuda::{CudaBackend, bandwidth as cuda_bandwidth};
use std::ops::Range;

type Cpu = CpuBackend;
type Cuda = CudaBackend;

/// A processor or a GPU.
pub enum AnyBackend {
    Cpu(Box<Cpu>),
    Cuda(Box<Cuda>),
}

/// Something that belongs to one of the devices.
pub enum On<C, G> {
    Cpu(C),
    Cuda(G),
}

impl AnyBackend {
    /// The GPU, or what is missing to use it.
    pub fn cuda() -> Result<Self> {
        Ok(Self::Cuda(Box::new(Cuda::open(0).context("--device cuda")?)))
    }

    /// The GPU if it can be used; `None` where there is no driver or no GPU. A GPU that is there but cannot be used is
    /// reported and left aside, aloud.
    pub fn cuda_if_usable() -> Option<Self> {
        use oscar_kernels_cuda::CudaError::{NoDevice, NoDriver};
        match Cuda::open(0) {
            Ok(cuda) => Some(Self::Cuda(Box::new(cuda))),
            Err(NoDriver | NoDevice) => None,
            Err(error) => {
                eprintln!("note: --device auto uses the CPU: {error}");
                None
            }
        }
    }

    /// The name that `--device` takes and results carry.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Cpu(_) => "cpu",
            Self::Cuda(_) => "cuda",
        }
    }

    pub fn as_cpu(&self) -> Option<&Cpu> {
        match self {
            Self::Cpu(cpu) => Some(cpu),
            Self::Cuda(_) => None,
        }
    }

    pub fn as_cuda(&self) -> Option<&Cuda> {
        match self {
            Self::Cpu(_) => None,
            Self::Cuda(cuda) => Some(cuda),
        }
    }

    /// GB/s of plain reading from the device's memory, measured now.
    pub fn read_ceiling(&self) -> Result<f64> {
        Ok(match self {
            Self::Cpu(cpu) => bandwidth::read_ceiling(cpu.kernels(), cpu.threads(), 512 << 20, 5),
            Self::Cuda(cuda) => cuda_bandwidth::read_ceiling(cuda.device(), cuda.kernels(), 4 << 30)?,
        })
    }

    /// Bytes free on the device; `None` where the system decides.
    pub fn free_memory(&self) -> Result<Option<usize>> {
        Ok(match self {
            Self::Cpu(_) => None,
            Self::Cuda(cuda) => Some(cuda.device().memory()?.0),
        })
    }
}

/// Calls the same method on the device behind the enums; every argument in brackets belongs to that device.
macro_rules! on_device {
    ($self:ident, $method:ident ( $($argument:tt),* $(,)? )) => {
        match $self {
            AnyBackend::Cpu(backend) => backend.$method($(on_device!(@ Cpu $argument)),*),
            AnyBackend::Cuda(backend) => backend.$method($(on_device!(@ Cuda $argument)),*),
        }
    };
    (@ $device:ident [$value:ident]) => {
        match $value {
            On::$device(value) => value,
            // Every object was made by the backend that now gets it back.
            _ => unreachable!("an object of another device"),
        }
    };
    (@ $device:ident $value:ident) => { $value };
}

/// What a backend made, wrapped.
macro_rules! made_on {
    ($self:ident, $method:ident ( $($argument:ident),* $(,)? )) => {
        Ok(match $self {
            AnyBackend::Cpu(backend) => On::Cpu(backend.$method($($argument),*)?),
            AnyBackend::Cuda(backend) => On::Cuda(backend.$method($($argument),*)?),
        })
    };
}

impl Backend for AnyBackend {
    type Rows = On<<Cpu as Backend>::Rows, <Cuda as Backend>::Rows>;
    type Matrix = On<<Cpu as Backend>::Matrix, <Cuda as Backend>::Matrix>;
    type Vector = On<<Cpu as Backend>::Vector, <Cuda as Backend>::Vector>;
    type Rope = On<<Cpu as Backend>::Rope, <Cuda as Backend>::Rope>;
    type LayerRotation = On<<Cpu as Backend>::LayerRotation, <Cuda as Backend>::LayerRotation>;
    type Pool = On<<Cpu as Backend>::Pool, <Cuda as Backend>::Pool>;

    fn describe(&self) -> String {
        on_device!(self, describe())
    }

    fn describe_attention(&self, layout: &CacheLayout) -> String {
        on_device!(self, describe_attention(layout))
    }

    fn page_order(&self) -> CodeLayout {
        on_device!(self, page_order())
    }

    fn held_layout(&self, layout: &CacheLayout) -> CacheLayout {
        on_device!(self, held_layout(layout))
    }

    fn matrix(&self, weights: HostMatrix<'_>) -> BackendResult<Self::Matrix> {
        made_on!(self, matrix(weights))
    }

    fn multiplies_fp8(&self) -> bool {
        on_device!(self, multiplies_fp8())
    }

    fn matrix_bytes(&self, matrix: &Self::Matrix) -> usize {
        on_device!(self, matrix_bytes([matrix]))
    }

    fn random_matrix(
        &self,
        format: WeightFormat,
        outputs: usize,
        inputs: usize,
        seed: u64,
    ) -> BackendResult<Self::Matrix> {
        made_on!(self, random_matrix(format, outputs, inputs, seed))
    }

    fn vector(&self, values: &[f32]) -> BackendResult<Self::Vector> {
        made_on!(self, vector(values))
    }

    fn rope(&self, cos: &[f32], sin: &[f32], head_dim: usize) -> BackendResult<Self::Rope> {
        made_on!(self, rope(cos, sin, head_dim))
    }

    fn layer_rotation(&self, heads: &[HeadRotations]) -> BackendResult<Self::LayerRotation> {
        made_on!(self, layer_rotation(heads))
    }

    fn pool(&self, layout: &CacheLayout, budget: usize) -> BackendResult<Self::Pool> {
        made_on!(self, pool(layout, budget))
    }

    fn randomize(&self, pool: &mut Self::Pool, full: usize, coded: usize) -> BackendResult<bool> {
        on_device!(self, randomize([pool], full, coded))
    }

    fn rows(&self, width: usize) -> Self::Rows {
        match self {
            Self::Cpu(backend) => On::Cpu(backend.rows(width)),
            Self::Cuda(backend) => On::Cuda(backend.rows(width)),
        }
    }

    fn begin_step(&self, sequences: &[SequenceRows<'_>], pool: &mut Self::Pool) -> BackendResult<()> {
        on_device!(self, begin_step(sequences, [pool]))
    }

    fn end_step(&self) -> BackendResult<()> {
        on_device!(self, end_step())
    }

    fn embed(&self, table: &Self::Matrix, tokens: &[u32], out: &mut Self::Rows) {
        on_device!(self, embed([table], tokens, [out]));
    }

    fn rms_norm(&self, x: &Self::Rows, weight: &Self::Vector, eps: f32, out: &mut Self::Rows) {
        on_device!(self, rms_norm([x], [weight], eps, [out]));
    }

    fn linear(&self, weight: &Self::Matrix, x: &Self::Rows, out: &mut Self::Rows, write: Write) {
        on_device!(self, linear([weight], [x], [out], write));
    }

    fn fused_gate(&self, weight: &Self::Matrix, x: &Self::Rows, out: &mut Self::Rows) -> bool {
        on_device!(self, fused_gate([weight], [x], [out]))
    }

    fn fused_norm(
        &self,
        norm: &Self::Vector,
        eps: f32,
        weight: &Self::Matrix,
        x: &Self::Rows,
        out: &mut Self::Rows,
        gated: bool,
    ) -> bool {
        on_device!(self, fused_norm([norm], eps, [weight], [x], [out], gated))
    }

    fn logits(&self, weight: &Self::Matrix, x: &Self::Rows, out: &mut Self::Rows) {
        on_device!(self, logits([weight], [x], [out]));
    }

    fn swiglu(&self, gate_up: &Self::Rows, out: &mut Self::Rows) {
        on_device!(self, swiglu([gate_up], [out]));
    }

    fn select(&self, x: &Self::Rows, rows: &[usize], out: &mut Self::Rows) {
        on_device!(self, select([x], rows, [out]));
    }

    fn read(&self, x: &Self::Rows, out: &mut Vec<f32>) -> BackendResult<()> {
        on_device!(self, read([x], out))
    }

    fn picks(&self) -> bool {
        on_device!(self, picks())
    }

    fn pick(
        &self,
        logits: &Self::Rows,
        rows: &[(usize, Pick)],
        out: &mut Vec<Vec<Candidate>>,
    ) -> BackendResult<()> {
        on_device!(self, pick([logits], rows, out))
    }

    fn accumulate_gram(
        &self,
        x: &Self::Rows,
        first: usize,
        width: usize,
        weights: Option<&[f32]>,
        gram: &mut [f64],
    ) -> BackendResult<()> {
        on_device!(self, accumulate_gram([x], first, width, weights, gram))
    }

    fn append(
        &self,
        layer: usize,
        shape: &HeadShape,
        heads: HeadPreparation<'_, Self>,
        rope: &Self::Rope,
        sequences: &[SequenceRows<'_>],
        qkv: &mut Self::Rows,
        queries: &mut Self::Rows,
        pool: &mut Self::Pool,
    ) -> BackendResult<()> {
        /// The heads' preparation for one device.
        macro_rules! prepared {
            ($device:ident) => {
                HeadPreparation {
                    qk_norm: match heads.qk_norm {
                        Some((On::$device(query), On::$device(key))) => Some((query, key)),
                        _ => None,
                    },
                    rotation: match heads.rotation {
                        Some(On::$device(rotation)) => Some(rotation),
                        _ => None,
                    },
                }
            };
        }
        match (self, rope, qkv, queries, pool) {
            (Self::Cpu(b), On::Cpu(rope), On::Cpu(qkv), On::Cpu(queries), On::Cpu(pool)) => {
                b.append(layer, shape, prepared!(Cpu), rope, sequences, qkv, queries, pool)
            }
            (Self::Cuda(b), On::Cuda(rope), On::Cuda(qkv), On::Cuda(queries), On::Cuda(pool)) => {
                b.append(layer, shape, prepared!(Cuda), rope, sequences, qkv, queries, pool)
            }
            _ => Err(BackendError::Shape { what: "heads".into(), detail: "of several devices".into() }),
        }
    }

    fn reads_demoted_tails(&self, layout: &CacheLayout) -> bool {
        on_device!(self, reads_demoted_tails(layout))
    }

    fn begin_demotion(&self, sequences: &[SequenceRows<'_>], pool: &mut Self::Pool) -> BackendResult<()> {
        on_device!(self, begin_demotion(sequences, [pool]))
    }

    fn read_full_rows(
        &self,
        head: CacheHead,
        full: &[Option<FullPageId>],
        positions: Range<usize>,
        pool: &Self::Pool,
        keys: &mut Vec<f32>,
        values: &mut Vec<f32>,
    ) -> BackendResult<()> {
        on_device!(self, read_full_rows(head, full, positions, [pool], keys, values))
    }

    fn write_full_rows(
        &self,
        head: CacheHead,
        full: &[Option<FullPageId>],
        first: usize,
        keys: &[f32],
        values: &[f32],
        pool: &mut Self::Pool,
    ) -> BackendResult<()> {
        on_device!(self, write_full_rows(head, full, first, keys, values, [pool]))
    }

    fn demote(
        &self,
        layer: usize,
        sequences: &[SequenceRows<'_>],
        pool: &mut Self::Pool,
    ) -> BackendResult<()> {
        on_device!(self, demote(layer, sequences, [pool]))
    }

    fn attention(
        &self,
        layer: usize,
        shape: &HeadShape,
        sequences: &[SequenceRows<'_>],
        queries: &Self::Rows,
        pool: &Self::Pool,
        out: &mut Self::Rows,
    ) -> BackendResult<()> {
        on_device!(self, attention(layer, shape, sequences, [queries], [pool], [out]))
    }
}
