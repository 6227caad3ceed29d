//! Checks of append: QK-norm, RoPE, key mean and rotation in f64 are the reference.

use crate::{Numbers, Report, largest_difference, read_all, upload};
use anyhow::{Context, Result};
use oscar_backend::{Backend, HeadShape, LayerHeads, Step};
use oscar_cache::{PagePool, SequencePages};
use oscar_codec::{CacheLayout, CodeLayout, HeadRotations, KvFormat, Rotation, Side, Windows};
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

/// QK-norm, RoPE, key mean and rotation on the way into the pages.
pub fn check(gpu: &CudaBackend, report: &mut Report) -> Result<()> {
    let mut numbers = Numbers::new(7);
    for d in [64, 128, 256] {
        for (rows, group) in [(1, 4), (50, 5), (3, 16)] {
            let kv_heads = 2;
            let layout =
                CacheLayout::new(KvFormat::Bf16, 1, kv_heads, d, Windows::default(), CodeLayout::GpuTile)?;
            let shape = HeadShape {
                query_heads: kv_heads * group,
                kv_heads,
                head_dim: d,
                rms_norm_eps: 1e-6,
                scale: 1.0,
            };
            let heads = rotated_heads(&mut numbers, kv_heads, d)?;
            let (query_norm, key_norm) = (numbers.vector(d), numbers.vector(d));
            let angles: Vec<f32> = (0..rows * d / 2).map(|_| numbers.unit() * 3.0).collect();
            let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
            let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
            let width = (kv_heads * group + 2 * kv_heads) * d;
            let values = numbers.vector(rows * width);

            let budget = layout.full_block_bytes() * 4;
            let (page_pool, mut pool) = (PagePool::new(&layout, budget), gpu.pool(&layout, &shape, budget)?);
            let mut pages = SequencePages::new();
            let plan = pages.prepare(&layout, &page_pool, rows)?;
            let sequence = [pages.rows(&plan, 0)];
            let mut qkv = upload(gpu, &values, width)?;
            let mut queries = gpu.rows(kv_heads * group * d);
            let (layer, rope) = (gpu.layer_rotation(&heads)?, gpu.rope(&cos, &sin, d)?);
            let norms = (gpu.vector(&query_norm)?, gpu.vector(&key_norm)?);
            let mut step = gpu.step(&sequence, &mut pool)?;
            let (qk_norm, rotation) = (Some((&norms.0, &norms.1)), Some(&layer));
            step.append(&LayerHeads { layer: 0, qk_norm, rope: &rope, rotation }, &mut qkv, &mut queries)?;
            let found = read_all::<CudaBackend>(&mut step, &queries, rows)?;
            step.finish()?;
            let what = || format!("head {d}, {rows} rows, group {group}");

            let prepared = |row: usize, head: usize, norm: &[f32]| -> Vec<f64> {
                let x: Vec<f64> =
                    values[row * width + head * d..][..d].iter().map(|&v| f64::from(v)).collect();
                let squares: f64 = x.iter().map(|v| v * v).sum();
                let factor = 1.0 / (squares / d as f64 + 1e-6).sqrt();
                let x: Vec<f64> = x.iter().zip(norm).map(|(v, &w)| v * factor * f64::from(w)).collect();
                let half = d / 2;
                let angle = |i: usize| (f64::from(cos[row * half + i]), f64::from(sin[row * half + i]));
                (0..d)
                    .map(|i| {
                        let (c, s) = angle(i % half);
                        if i < half { x[i] * c - x[i + half] * s } else { x[i] * c + x[i - half] * s }
                    })
                    .collect()
            };
            let rotated = |x: &[f64]| -> Vec<f64> {
                (0..d)
                    .map(|j| (0..d).map(|i| x[i] * f64::from(heads[0].key.matrix()[i * d + j])).sum())
                    .collect()
            };
            for row in 0..rows {
                for head in 0..kv_heads * group {
                    let expected = rotated(&prepared(row, head, &query_norm));
                    let at = (row * kv_heads * group + head) * d;
                    report.case(
                        "append, queries",
                        largest_difference(&found[at..at + d], &expected),
                        2e-4,
                        what,
                    );
                }
                for head in 0..kv_heads {
                    let codec = layout.full().codec(0, head);
                    let id = pages.full()[0].context("the first page")?;
                    let page = pool.read_page(0, head, id.0, false)?;
                    let (mut key, mut value) = (vec![0.0; d], vec![0.0; d]);
                    codec.decode_row(Side::Key, &page, row, &mut key);
                    codec.decode_row(Side::Value, &page, row, &mut value);
                    let mut expected = prepared(row, kv_heads * group + head, &key_norm);
                    let mean = heads[head].key_mean.as_deref().unwrap_or_default();
                    expected.iter_mut().zip(mean).for_each(|(e, &m)| *e -= f64::from(m));
                    let expected = rotated(&expected);
                    let largest = expected.iter().fold(0f64, |a, b| a.max(b.abs()));
                    // Stored in BF16: half a unit in the last of 8 bits.
                    let allowed = largest / 256.0 + 2e-4;
                    report.case("append, keys", largest_difference(&key, &expected), allowed, what);
                    let stored: Vec<f64> = values[row * width + (kv_heads * (group + 1) + head) * d..][..d]
                        .iter()
                        .map(|&v| f64::from(v))
                        .collect();
                    report.case("append, values", largest_difference(&value, &stored), 0.0, what);
                }
            }
        }
    }
    Ok(())
}
