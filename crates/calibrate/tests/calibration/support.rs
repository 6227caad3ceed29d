//! The recorded layer and the backend the tests run on.

use half::f16;
use oscar_backend::Tap;
use oscar_calibrate::Statistic;
use oscar_calibrate::moments::{HeadGrid, HeadStatistics, Moments};
use oscar_calibrate::sample::{HeadSample, RowSample};
use oscar_kernels_cpu::Kernels;
use oscar_kernels_cpu::backend::{CpuBackend, CpuRows, Mode};
use safetensors::{Dtype, SafeTensors};

const FIXTURE: &[u8] = include_bytes!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../codec/tests/fixtures/calibration_layer.safetensors"
));

/// Queries, keys and values of one layer on 192 tokens.
pub const TOKENS: usize = 192;
pub const GRID: HeadGrid = HeadGrid { layers: 1, query_heads: 8, kv_heads: 2, head_dim: 128 };

pub fn fixture(name: &str) -> Vec<f32> {
    let tensors = SafeTensors::deserialize(FIXTURE).unwrap();
    let tensor = tensors.tensor(name).unwrap();
    let bytes = tensor.data();
    match tensor.dtype() {
        Dtype::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
    }
}

pub fn backend(mode: Mode) -> CpuBackend {
    CpuBackend::new(Kernels::chosen().unwrap(), 2, mode).unwrap()
}

/// These rows of a matrix.
pub fn rows(values: &[f32], width: usize, range: std::ops::Range<usize>) -> CpuRows {
    CpuRows::new(width, values[range.start * width..range.end * width].to_vec())
}

/// `[queries | keys | values]` of every token.
pub fn qkv() -> Vec<f32> {
    let (q, k, v) = (fixture("q"), fixture("k"), fixture("v"));
    let rows = q.chunks_exact(8 * 128).zip(k.chunks_exact(2 * 128)).zip(v.chunks_exact(2 * 128));
    rows.flat_map(|((q, k), v)| [q, k, v].concat()).collect()
}

/// Causal attention outputs of all query heads, computed plainly in f64.
pub fn attended() -> Vec<f32> {
    let (q, k, v) = (fixture("q"), fixture("k"), fixture("v"));
    let d = GRID.head_dim;
    let mut out = vec![0.0f32; q.len()];
    for t in 0..TOKENS {
        for head in 0..GRID.query_heads {
            let kv = head / GRID.group();
            let query = &q[(t * GRID.query_heads + head) * d..][..d];
            let row = |x: &[f32], j: usize| x[(j * GRID.kv_heads + kv) * d..][..d].to_vec();
            let scores: Vec<f64> = (0..=t)
                .map(|j| {
                    let dot: f64 =
                        query.iter().zip(row(&k, j)).map(|(&a, b)| f64::from(a) * f64::from(b)).sum();
                    dot / (d as f64).sqrt()
                })
                .collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
            let mut sum = vec![0.0f64; d];
            for (j, score) in scores.iter().enumerate() {
                let p = (score - top).exp() / total;
                sum.iter_mut().zip(row(&v, j)).for_each(|(s, v)| *s += p * f64::from(v));
            }
            let target = &mut out[(t * GRID.query_heads + head) * d..][..d];
            target.iter_mut().zip(sum).for_each(|(o, s)| *o = s as f32);
        }
    }
    out
}

/// Statistics of the recorded layer, its tokens arriving `chunk` at a time.
pub fn statistics(statistic: Statistic, chunk: usize) -> (Vec<HeadStatistics>, Vec<HeadSample>) {
    let backend = backend(Mode::F32);
    let (qkv, attended) = (qkv(), attended());
    let sample = RowSample::new(GRID.heads(), GRID.head_dim, &[TOKENS], 128, 1);
    let mut moments = Moments::new(GRID, statistic, sample);
    for pass in 0..Moments::passes(statistic) {
        let mut tap = moments.pass(pass);
        for first in (0..TOKENS).step_by(chunk) {
            let range = first..TOKENS.min(first + chunk);
            tap.first_token = first;
            let (heads, outputs) = (rows(&qkv, 12 * 128, range.clone()), rows(&attended, 8 * 128, range));
            tap.heads(0, &mut backend.tapped(&heads)).unwrap();
            tap.attended(0, &mut backend.tapped(&outputs)).unwrap();
        }
    }
    let (heads, sample) = moments.finish();
    let samples = (0..GRID.heads()).map(|head| sample.head(head)).collect();
    (heads, samples)
}
