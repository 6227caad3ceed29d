//! The device a command runs on, chosen at start: one type for all of them, so that commands need not be generic.

use anyhow::{Context, Result};
use oscar_backend::{
    AttentionKernels, Backend, BlockId, Candidate, Communicator, DeltaLayer, DeltaStep, ExpertId,
    ExpertsShape, Feature, HeadHistory, HeadShape, HistoryRows, HostMatrix, LatentHeads, LayerHeads, Pick,
    PrefillWave, Product, Result as BackendResult, RowEviction, SequenceRows, Step, StepMemory, StepSize,
    Tap, View, latent_refusal,
};
use oscar_codec::{CacheLayout, HeadRotations};
use oscar_hybrid::{HybridBackend, HybridStep};
use oscar_kernels_cpu::backend::{CpuBackend, CpuStep};
use oscar_kernels_cpu::bandwidth;
use oscar_kernels_cuda::{CudaBackend, read_ceiling};
use std::time::Duration;

type Cpu = CpuBackend;
/// A GPU; `--cpu-experts` gives the experts of some layers to the processor.
type Cuda = HybridBackend<CudaBackend>;

/// A processor or a GPU.
pub enum AnyBackend {
    Cpu(Box<Cpu>),
    Cuda(Box<Cuda>),
}

/// An object of one of the devices.
pub enum On<C, G> {
    Cpu(C),
    Cuda(G),
}

impl<C, G> On<C, G> {
    // Every object was made by the backend that now gets it back.

    fn cpu(&self) -> &C {
        let Self::Cpu(object) = self else { unreachable!("an object of another device") };
        object
    }

    fn cuda(&self) -> &G {
        let Self::Cuda(object) = self else { unreachable!("an object of another device") };
        object
    }

    fn cpu_mut(&mut self) -> &mut C {
        let Self::Cpu(object) = self else { unreachable!("an object of another device") };
        object
    }

    fn cuda_mut(&mut self) -> &mut G {
        let Self::Cuda(object) = self else { unreachable!("an object of another device") };
        object
    }
}

impl AnyBackend {
    /// Time after which a step counts as stuck, unless the user says otherwise. A prompt step of a
    /// large model takes minutes on a small CPU.
    pub fn default_stuck_after(&self) -> Duration {
        Duration::from_secs(match self {
            Self::Cuda(cuda) if cuda.host().is_none() => 120,
            Self::Cpu(_) | Self::Cuda(_) => 1800,
        })
    }

    /// Share of the free memory that KV pages get, unless the user says otherwise. A GPU serves one
    /// program; a CPU's memory serves others too.
    pub fn default_kv_share(&self) -> f64 {
        match self {
            Self::Cpu(_) => 0.5,
            Self::Cuda(_) => 0.9,
        }
    }

    /// The GPU, or what is missing to use it.
    pub fn cuda() -> Result<CudaBackend> {
        CudaBackend::open(0).context("--device cuda")
    }

    /// A GPU with a processor that computes the experts of some layers, if one is given.
    pub fn gpu(cuda: CudaBackend, experts: Option<Cpu>) -> Self {
        Self::Cuda(Box::new(match experts {
            Some(cpu) => HybridBackend::with_host(cuda, cpu),
            None => HybridBackend::alone(cuda),
        }))
    }

    /// The GPU if it can be used; `None` where there is no driver or no GPU. A GPU that is there but cannot be used is
    /// reported and left aside, aloud.
    pub fn cuda_if_usable() -> Option<CudaBackend> {
        use oscar_kernels_cuda::CudaError::{NoDevice, NoDriver};
        match CudaBackend::open(0) {
            Ok(cuda) => Some(cuda),
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

    pub fn as_cuda(&self) -> Option<&CudaBackend> {
        self.as_hybrid().map(HybridBackend::device)
    }

    /// The GPU with the processor beside it.
    pub fn as_hybrid(&self) -> Option<&Cuda> {
        match self {
            Self::Cpu(_) => None,
            Self::Cuda(cuda) => Some(cuda),
        }
    }

    /// GB/s of plain reading from the device's memory, measured now.
    pub fn read_ceiling(&self) -> Result<f64> {
        Ok(match self {
            Self::Cpu(cpu) => bandwidth::read_ceiling(cpu.kernels(), cpu.threads(), 512 << 20, 5),
            Self::Cuda(cuda) => read_ceiling(cuda.device().device(), cuda.device().kernels(), 4 << 30)?,
        })
    }

    /// Bytes that this process may still take; `None` where the system does not tell.
    pub fn available_memory(&self) -> Result<Option<usize>> {
        Ok(self.free_memory()?.or_else(crate::host_memory::available))
    }
}

/// Calls the same method on the device behind an enum. Arguments after `&` and `&mut` are objects of
/// that device; the others are the same for all devices.
macro_rules! on_device {
    ($enum:ident, $on:expr, $method:ident ( $($arguments:tt)* )) => {
        match $on {
            $enum::Cpu(device) => on_device!(@ device.$method, cpu, cpu_mut, [] $($arguments)*),
            $enum::Cuda(device) => on_device!(@ device.$method, cuda, cuda_mut, [] $($arguments)*),
        }
    };
    (@ $device:ident.$method:ident, $get:ident, $get_mut:ident, [$($done:expr,)*]) => {
        $device.$method($($done),*)
    };
    (@ $device:ident.$method:ident, $get:ident, $get_mut:ident, [$($done:expr,)*] &mut $x:ident $(, $($rest:tt)*)?) => {
        on_device!(@ $device.$method, $get, $get_mut, [$($done,)* $x.$get_mut(),] $($($rest)*)?)
    };
    (@ $device:ident.$method:ident, $get:ident, $get_mut:ident, [$($done:expr,)*] &$x:ident $(, $($rest:tt)*)?) => {
        on_device!(@ $device.$method, $get, $get_mut, [$($done,)* $x.$get(),] $($($rest)*)?)
    };
    (@ $device:ident.$method:ident, $get:ident, $get_mut:ident, [$($done:expr,)*] $x:ident $(, $($rest:tt)*)?) => {
        on_device!(@ $device.$method, $get, $get_mut, [$($done,)* $x,] $($($rest)*)?)
    };
}

/// An object that a backend made, wrapped.
macro_rules! made_on {
    ($self:ident, $method:ident ( $($argument:ident),* $(,)? )) => {
        Ok(match $self {
            AnyBackend::Cpu(backend) => On::Cpu(backend.$method($($argument),*)?),
            AnyBackend::Cuda(backend) => On::Cuda(backend.$method($($argument),*)?),
        })
    };
}

mod extensions;

impl Backend for AnyBackend {
    type Rows = On<<Cpu as Backend>::Rows, <Cuda as Backend>::Rows>;
    type Matrix = On<<Cpu as Backend>::Matrix, <Cuda as Backend>::Matrix>;
    type Vector = On<<Cpu as Backend>::Vector, <Cuda as Backend>::Vector>;
    type Rope = On<<Cpu as Backend>::Rope, <Cuda as Backend>::Rope>;
    type LayerRotation = On<<Cpu as Backend>::LayerRotation, <Cuda as Backend>::LayerRotation>;
    type Experts = On<<Cpu as Backend>::Experts, <Cuda as Backend>::Experts>;
    type Pool = On<<Cpu as Backend>::Pool, <Cuda as Backend>::Pool>;
    type Step<'s> = AnyStep<'s>;

    fn describe(&self) -> String {
        on_device!(Self, self, describe())
    }

    fn attention(&self, layout: &CacheLayout) -> AttentionKernels {
        on_device!(Self, self, attention(layout))
    }

    fn held_layout(&self, layout: &CacheLayout) -> CacheLayout {
        on_device!(Self, self, held_layout(layout))
    }

    fn reads_codes_in_window(&self, layout: &CacheLayout) -> bool {
        on_device!(Self, self, reads_codes_in_window(layout))
    }

    fn multiplies_fp8(&self) -> bool {
        on_device!(Self, self, multiplies_fp8())
    }

    fn computes(&self, feature: Feature) -> bool {
        on_device!(Self, self, computes(feature))
    }

    fn prefill_chunk(&self, heads: &HeadShape) -> usize {
        on_device!(Self, self, prefill_chunk(heads))
    }

    fn prefill_wave(&self, heads: &HeadShape) -> PrefillWave {
        on_device!(Self, self, prefill_wave(heads))
    }

    fn wait(&self) -> BackendResult<()> {
        on_device!(Self, self, wait())
    }

    fn step_memory(&self, size: &StepSize) -> StepMemory {
        on_device!(Self, self, step_memory(size))
    }

    fn free_memory(&self) -> BackendResult<Option<usize>> {
        on_device!(Self, self, free_memory())
    }

    fn communicator(&self) -> Option<&dyn Communicator> {
        on_device!(Self, self, communicator())
    }

    fn matrix(&self, weights: HostMatrix<'_>) -> BackendResult<Self::Matrix> {
        made_on!(self, matrix(weights))
    }

    fn matrix_bytes(&self, matrix: &Self::Matrix) -> usize {
        on_device!(Self, self, matrix_bytes(&matrix))
    }

    fn vector(&self, values: &[f32]) -> BackendResult<Self::Vector> {
        made_on!(self, vector(values))
    }

    fn rope(&self, cos: &[f32], sin: &[f32], rotary_dim: usize) -> BackendResult<Self::Rope> {
        made_on!(self, rope(cos, sin, rotary_dim))
    }

    fn experts(&self, shape: &ExpertsShape<'_>) -> BackendResult<Self::Experts> {
        made_on!(self, experts(shape))
    }

    fn load_expert(
        &self,
        experts: &mut Self::Experts,
        id: ExpertId,
        parts: [HostMatrix<'_>; 3],
    ) -> BackendResult<()> {
        on_device!(Self, self, load_expert(&mut experts, id, parts))
    }

    fn expert_bytes(&self, experts: &Self::Experts) -> (usize, usize) {
        on_device!(Self, self, expert_bytes(&experts))
    }

    fn layer_rotation(&self, heads: &[HeadRotations]) -> BackendResult<Self::LayerRotation> {
        made_on!(self, layer_rotation(heads))
    }

    fn rows(&self, width: usize) -> Self::Rows {
        match self {
            Self::Cpu(backend) => On::Cpu(backend.rows(width)),
            Self::Cuda(backend) => On::Cuda(backend.rows(width)),
        }
    }

    fn pool(&self, layout: &CacheLayout, heads: &HeadShape, budget: usize) -> BackendResult<Self::Pool> {
        made_on!(self, pool(layout, heads, budget))
    }

    fn step<'s>(
        &'s self,
        sequences: &'s [SequenceRows<'s>],
        pool: &'s mut Self::Pool,
    ) -> BackendResult<AnyStep<'s>> {
        #[cfg(debug_assertions)]
        crate::test_fault::strike()?;
        Ok(match self {
            Self::Cpu(backend) => AnyStep::Cpu(backend.step(sequences, pool.cpu_mut())?),
            Self::Cuda(backend) => AnyStep::Cuda(Box::new(backend.step(sequences, pool.cuda_mut())?)),
        })
    }

    fn copies_blocks(&self) -> bool {
        on_device!(Self, self, copies_blocks())
    }

    fn read_blocks(&self, pool: &Self::Pool, blocks: &mut [(BlockId, &mut Vec<u8>)]) -> BackendResult<()> {
        on_device!(Self, self, read_blocks(&pool, blocks))
    }

    fn write_blocks(&self, pool: &mut Self::Pool, blocks: &[(BlockId, &[u8])]) -> BackendResult<()> {
        on_device!(Self, self, write_blocks(&mut pool, blocks))
    }

    fn evicts_rows(&self, layout: &CacheLayout) -> RowEviction {
        on_device!(Self, self, evicts_rows(layout))
    }

    fn gather(&self, from: &SequenceRows<'_>, view: &View, pool: &mut Self::Pool) -> BackendResult<()> {
        on_device!(Self, self, gather(from, view, &mut pool))
    }

    fn history(
        &self,
        from: &SequenceRows<'_>,
        rows: HeadHistory,
        pool: &Self::Pool,
    ) -> BackendResult<HistoryRows> {
        on_device!(Self, self, history(from, rows, &pool))
    }
}

/// A step on one of the devices.
pub enum AnyStep<'s> {
    Cpu(CpuStep<'s>),
    Cuda(Box<HybridStep<'s, CudaBackend>>),
}

type Rows = <AnyBackend as Backend>::Rows;
type Matrix = <AnyBackend as Backend>::Matrix;
type Vector = <AnyBackend as Backend>::Vector;
type Experts = <AnyBackend as Backend>::Experts;

impl DeltaStep<AnyBackend> for AnyStep<'_> {
    fn mix_delta(
        &mut self,
        layer: DeltaLayer<'_, AnyBackend>,
        projected: &Rows,
        out: &mut Rows,
    ) -> BackendResult<()> {
        let DeltaLayer { layer, shape, conv, decay, time_bias, norm: (norm, eps) } = layer;
        match self {
            Self::Cpu(step) => {
                let [conv, decay, time_bias] = [conv, decay, time_bias].map(On::cpu);
                let norm = (norm.cpu(), eps);
                let layer = DeltaLayer { layer, shape, conv, decay, time_bias, norm };
                step.mix_delta(layer, projected.cpu(), out.cpu_mut())
            }
            Self::Cuda(step) => {
                let [conv, decay, time_bias] = [conv, decay, time_bias].map(On::cuda);
                let norm = (norm.cuda(), eps);
                let layer = DeltaLayer { layer, shape, conv, decay, time_bias, norm };
                step.mix_delta(layer, projected.cuda(), out.cuda_mut())
            }
        }
    }

    fn gate_heads(&mut self, unrotate: &[&Matrix], gates: &Rows, attended: &mut Rows) -> BackendResult<()> {
        match self {
            Self::Cpu(step) => {
                let unrotate: Vec<_> = unrotate.iter().map(|matrix| matrix.cpu()).collect();
                step.gate_heads(&unrotate, gates.cpu(), attended.cpu_mut())
            }
            Self::Cuda(step) => {
                let unrotate: Vec<_> = unrotate.iter().map(|matrix| matrix.cuda()).collect();
                step.gate_heads(&unrotate, gates.cuda(), attended.cuda_mut())
            }
        }
    }
}

impl Step<AnyBackend> for AnyStep<'_> {
    fn embed(&mut self, table: &Matrix, tokens: &[u32], scale: f32, out: &mut Rows) -> BackendResult<()> {
        on_device!(Self, self, embed(&table, tokens, scale, &mut out))
    }

    fn select(&mut self, x: &Rows, rows: &[usize], out: &mut Rows) -> BackendResult<()> {
        on_device!(Self, self, select(&x, rows, &mut out))
    }

    fn product(&mut self, product: Product<'_, AnyBackend>, x: &Rows, out: &mut Rows) -> BackendResult<()> {
        let Product { weight, norm, output, result_norm } = product;
        match self {
            Self::Cpu(step) => {
                let [norm, result_norm] = [norm, result_norm].map(|n| n.map(|(norm, eps)| (norm.cpu(), eps)));
                let product = Product { weight: weight.cpu(), norm, output, result_norm };
                step.product(product, x.cpu(), out.cpu_mut())
            }
            Self::Cuda(step) => {
                let [norm, result_norm] =
                    [norm, result_norm].map(|n| n.map(|(norm, eps)| (norm.cuda(), eps)));
                let product = Product { weight: weight.cuda(), norm, output, result_norm };
                step.product(product, x.cuda(), out.cuda_mut())
            }
        }
    }

    fn experts(&mut self, experts: &Experts, norm: (&Vector, f32), x: &mut Rows) -> BackendResult<()> {
        let (norm, eps) = norm;
        match self {
            Self::Cpu(step) => step.experts(experts.cpu(), (norm.cpu(), eps), x.cpu_mut()),
            Self::Cuda(step) => step.experts(experts.cuda(), (norm.cuda(), eps), x.cuda_mut()),
        }
    }

    fn attend(
        &mut self,
        heads: LayerHeads<'_, AnyBackend>,
        qkv: &mut Rows,
        out: &mut Rows,
        tap: Option<&mut dyn Tap>,
    ) -> BackendResult<()> {
        let LayerHeads { layer, qk_norm, rope, rotation, window, sinks } = heads;
        match self {
            Self::Cpu(step) => {
                let qk_norm = qk_norm.map(|(q, k)| (q.cpu(), k.cpu()));
                let (rope, rotation, sinks) = (rope.cpu(), rotation.map(On::cpu), sinks.map(On::cpu));
                let heads = LayerHeads { layer, qk_norm, rope, rotation, window, sinks };
                step.attend(heads, qkv.cpu_mut(), out.cpu_mut(), tap)
            }
            Self::Cuda(step) => {
                let qk_norm = qk_norm.map(|(q, k)| (q.cuda(), k.cuda()));
                let (rope, rotation, sinks) = (rope.cuda(), rotation.map(On::cuda), sinks.map(On::cuda));
                let heads = LayerHeads { layer, qk_norm, rope, rotation, window, sinks };
                step.attend(heads, qkv.cuda_mut(), out.cuda_mut(), tap)
            }
        }
    }

    fn attend_latent(
        &mut self,
        heads: LatentHeads<'_, AnyBackend>,
        queries: &Rows,
        latent: &Rows,
        out: &mut Rows,
    ) -> BackendResult<()> {
        let LatentHeads { layer, shape, norm: (norm, eps), rope, key_up, value_up } = heads;
        let Self::Cpu(step) = self else { return Err(latent_refusal()) };
        let [key_up, value_up] =
            [key_up, value_up].map(|up| up.iter().map(|matrix| matrix.cpu()).collect::<Vec<_>>());
        let (norm, rope) = ((norm.cpu(), eps), rope.cpu());
        let heads = LatentHeads { layer, shape, norm, rope, key_up: &key_up, value_up: &value_up };
        step.attend_latent(heads, queries.cpu(), latent.cpu(), out.cpu_mut())
    }

    fn all_reduce(&mut self, x: &mut Rows) -> BackendResult<()> {
        on_device!(Self, self, all_reduce(&mut x))
    }

    fn all_gather(&mut self, part: &Rows, whole: &mut Rows) -> BackendResult<()> {
        on_device!(Self, self, all_gather(&part, &mut whole))
    }

    fn read(&mut self, x: &Rows, rows: &[usize], out: &mut Vec<f32>) -> BackendResult<()> {
        on_device!(Self, self, read(&x, rows, out))
    }

    fn pick(
        &mut self,
        logits: &Rows,
        rows: &[(usize, Pick)],
        out: &mut Vec<Vec<Candidate>>,
    ) -> BackendResult<()> {
        on_device!(Self, self, pick(&logits, rows, out))
    }

    fn finish(self) -> BackendResult<()> {
        on_device!(Self, self, finish())
    }
}
