//! Checks of append: QK-norm, RoPE, key mean and rotation in f64 are the reference.

use crate::{Numbers, Report, largest_difference, read_all, upload};
use anyhow::{Context, Result};
use oscar_backend::{Backend, HeadShape, LayerHeads, Step};
use oscar_cache::{PagePool, SequencePages};
use oscar_codec::{CacheLayout, CodeLayout, HeadRotations, KvFormat, PAGE_TOKENS, Rotation, Side, Windows};
use oscar_kernels_cuda::CudaBackend;

/// Heads that are rotated and have a key mean.
pub fn rotated_heads(numbers: &mut Numbers, kv_heads: usize, d: usize) -> Result<Vec<HeadRotations>> {
    let rotation = Rotation::hadamard(d)?;
    let mut head = || HeadRotations {
        key: rotation.clone(),
        value: rotation.clone(),
        key_mean: Some(numbers.vector(d)),
    };
    Ok((0..kv_heads).map(|_| head()).collect())
}

const KV_HEADS: usize = 2;

pub fn check(gpu: &CudaBackend, report: &mut Report) -> Result<()> {
    let mut numbers = Numbers::new(7);
    for d in [64, 128, 256] {
        // Up to 16 rows, and with a tap, another kernel runs than for the rows of a prompt.
        for (rows, group) in [(1, 4), (50, 5), (3, 16), (17, 1), (333, 4)] {
            let appended = Appended::draw(&mut numbers, d, rows, group)?;
            for (tapped, rotated) in [(true, true), (false, true), (false, false)] {
                appended.check(gpu, tapped, rotated, report)?;
            }
        }
    }
    Ok(())
}

/// The projections of some rows, and the constants of their heads.
struct Appended {
    d: usize,
    rows: usize,
    group: usize,
    heads: Vec<HeadRotations>,
    query_norm: Vec<f32>,
    key_norm: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Rows of `[queries | keys | values]`.
    values: Vec<f32>,
}

impl Appended {
    fn draw(numbers: &mut Numbers, d: usize, rows: usize, group: usize) -> Result<Self> {
        let heads = rotated_heads(numbers, KV_HEADS, d)?;
        let (query_norm, key_norm) = (numbers.vector(d), numbers.vector(d));
        let angles: Vec<f32> = (0..rows * d / 2).map(|_| numbers.unit() * 3.0).collect();
        let (cos, sin) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
        let values = numbers.vector(rows * KV_HEADS * (group + 2) * d);
        Ok(Self { d, rows, group, heads, query_norm, key_norm, cos, sin, values })
    }

    /// Head `head` of a row, of `[queries | keys | values]`.
    fn head(&self, row: usize, head: usize) -> Vec<f64> {
        let (d, width) = (self.d, KV_HEADS * (self.group + 2) * self.d);
        self.values[row * width + head * d..][..d].iter().map(|&v| f64::from(v)).collect()
    }

    /// A query or key head after QK-norm and RoPE.
    fn prepared(&self, row: usize, head: usize, norm: &[f32]) -> Vec<f64> {
        let (d, half, x) = (self.d, self.d / 2, self.head(row, head));
        let squares: f64 = x.iter().map(|v| v * v).sum();
        let factor = 1.0 / (squares / d as f64 + 1e-6).sqrt();
        let x: Vec<f64> = x.iter().zip(norm).map(|(v, &w)| v * factor * f64::from(w)).collect();
        let angle = |i: usize| (f64::from(self.cos[row * half + i]), f64::from(self.sin[row * half + i]));
        let rope = |i: usize| {
            let (c, s) = angle(i % half);
            if i < half { x[i] * c - x[i + half] * s } else { x[i] * c + x[i - half] * s }
        };
        (0..d).map(rope).collect()
    }

    fn rotate(&self, x: &[f64]) -> Vec<f64> {
        let (d, matrix) = (self.d, self.heads[0].key.matrix());
        (0..d).map(|j| (0..d).map(|i| x[i] * f64::from(matrix[i * d + j])).sum()).collect()
    }

    /// Appends the rows on the GPU and compares queries, keys and values. Without `rotated` there is
    /// neither a rotation nor a key mean.
    fn check(&self, gpu: &CudaBackend, tapped: bool, rotated: bool, report: &mut Report) -> Result<()> {
        let Self { d, rows, group, .. } = *self;
        let windows = Windows::default();
        let layout = CacheLayout::new(KvFormat::Bf16, 1, KV_HEADS, d, windows, CodeLayout::GpuTile)?;
        let query_heads = KV_HEADS * group;
        let shape =
            HeadShape { query_heads, kv_heads: KV_HEADS, head_dim: d, rms_norm_eps: 1e-6, scale: 1.0 };
        let budget = layout.full_block_bytes() * (rows / PAGE_TOKENS + 4);
        let (page_pool, mut pool) = (PagePool::new(&layout, budget), gpu.pool(&layout, &shape, budget)?);
        let mut pages = SequencePages::new();
        let plan = pages.prepare(&layout, &page_pool, rows)?;
        let sequence = [pages.rows(&plan, 0)];
        let mut qkv = upload(gpu, &self.values, (query_heads + 2 * KV_HEADS) * d)?;
        let mut queries = gpu.rows(query_heads * d);
        let (layer, rope) = (gpu.layer_rotation(&self.heads)?, gpu.rope(&self.cos, &self.sin, d)?);
        let norms = (gpu.vector(&self.query_norm)?, gpu.vector(&self.key_norm)?);
        let mut step = gpu.step(&sequence, &mut pool)?;
        let (qk_norm, rotation) = (Some((&norms.0, &norms.1)), rotated.then_some(&layer));
        let heads = LayerHeads { layer: 0, qk_norm, rope: &rope, rotation, window: None, sinks: None };
        step.append(&heads, &mut qkv, &mut queries, tapped)?;
        let found = read_all::<CudaBackend>(&mut step, &queries, rows)?;
        step.finish()?;
        let what = || format!("head {d}, {rows} rows, group {group}, tapped {tapped}, rotated {rotated}");
        let turned = |x: Vec<f64>| if rotated { self.rotate(&x) } else { x };
        // The rows of a prompt are rotated in FP16: 11 bits of vectors and rotation.
        let prompt = rotated && !tapped && rows > 16 && d <= 128;
        let of_rotation = if prompt { 2f64.powi(-10) } else { 0.0 };
        for (i, found) in found.chunks_exact(d).enumerate() {
            let (row, head) = (i / query_heads, i % query_heads);
            let expected = turned(self.prepared(row, head, &self.query_norm));
            let largest = expected.iter().fold(0f64, |a, b| a.max(b.abs()));
            let allowed = 2e-4 + largest * of_rotation;
            report.case("append, queries", largest_difference(found, &expected), allowed, what);
        }
        for head in 0..KV_HEADS {
            for row in 0..rows {
                let id = pages.full()[row / PAGE_TOKENS].context("the page of a row")?;
                let (page, token) = (pool.read_page(0, head, id.0, false)?, row % PAGE_TOKENS);
                let (mut key, mut value) = (vec![0.0; d], vec![0.0; d]);
                layout.full().codec(0, head).dequantize_row(Side::Key, &page, token, &mut key);
                layout.full().codec(0, head).dequantize_row(Side::Value, &page, token, &mut value);
                let mut expected = self.prepared(row, query_heads + head, &self.key_norm);
                let mean = self.heads[head].key_mean.as_deref().unwrap_or_default();
                if rotated {
                    expected.iter_mut().zip(mean).for_each(|(e, &m)| *e -= f64::from(m));
                }
                let expected = turned(expected);
                let largest = expected.iter().fold(0f64, |a, b| a.max(b.abs()));
                // Stored in BF16: half a unit in the last of 8 bits.
                let allowed = largest * (1.0 / 256.0 + of_rotation) + 2e-4;
                report.case("append, keys", largest_difference(&key, &expected), allowed, what);
                let stored = self.head(row, query_heads + KV_HEADS + head);
                report.case("append, values", largest_difference(&value, &stored), 0.0, what);
            }
        }
        Ok(())
    }
}
