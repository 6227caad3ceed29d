//! Decode attention over long contexts, BF16 and coded, against the rate at which memory can be read.
//!
//! `cargo run --release --example attention_bench -- [threads] [head_dim] [formats] [rows]`
//!
//! Each row of the table is the attention of one KV head: K and V pages of one contiguous pool, in order or
//! shuffled, read once by all query heads of the group. Numbers are the best of several runs. With a list of formats
//! (`bf16,oscar2`) or of rows (`4,8`) only those are measured, and neither prefill nor demotion.

use std::time::Instant;

use oscar_codec::attention::PagedContext;
use oscar_codec::{CodeLayout, KvFormat, PAGE_TOKENS, PageCodec, Windows};
use oscar_kernels_cpu::attention::{
    AttendTask, AttentionPrecision, Scratch, append_rows, attend, demote_tile, kernel_name,
};
use oscar_kernels_cpu::bandwidth::read_ceiling;
use oscar_kernels_cpu::buffer::Buffer;
use oscar_kernels_cpu::{Kernels, ThreadPool, Variant};

/// Tokens read in one run, so that all contexts are measured for about as long.
const TOKENS_A_RUN: usize = 128 * 1024;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Pages of `copies` contexts of `tokens` tokens: one page of random rows, repeated, which costs the same to read.
struct Pool {
    memory: Buffer,
    page_bytes: usize,
}

impl Pool {
    fn new(page: &[u8], pages: usize) -> Self {
        let mut memory = Buffer::zeroed(pages * page.len() / 4);
        let words: Vec<u32> =
            page.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        memory.words_mut().chunks_exact_mut(words.len()).for_each(|to| to.copy_from_slice(&words));
        Self { memory, page_bytes: page.len() }
    }

    fn pages(&self) -> Vec<Option<&[u8]>> {
        let words = self.memory.words();
        words.chunks_exact(self.page_bytes / 4).map(|page| Some(as_bytes(page))).collect()
    }
}

#[allow(unsafe_code)]
fn as_bytes(words: &[u32]) -> &[u8] {
    // SAFETY: words are plain bytes, and bytes need no alignment.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let threads = arguments.next().map_or(Ok(1), |a| a.parse())?;
    let d = arguments.next().map_or(Ok(128), |a| a.parse())?;
    let formats = arguments.next();
    let groups = arguments.next().unwrap_or_else(|| "4,8".to_owned());
    let groups = groups.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
    let variant = Variant::chosen()?;
    let precision = AttentionPrecision::chosen()?;
    let pool = ThreadPool::new(threads)?;
    let ceiling = read_ceiling(Kernels::for_variant(variant)?, &pool, 512 << 20, 9);
    println!("{}, {threads} threads, head {d}, read ceiling {ceiling:.1} GB/s", variant.describe());
    println!(
        "{:<8} {:<30} {:>7} {:>5} {:>9} {:>9} {:>7} {:>9} {:>8}",
        "kv", "kernel", "tokens", "rows", "order", "Mtok/s", "GB/s", "ceiling", "x bf16"
    );

    let mut random = Random(88_172_645_463_325_252);
    let mut rows = || (0..PAGE_TOKENS * d).map(|_| random.uniform() + random.uniform()).collect::<Vec<f32>>();
    let (keys, values, queries) = (rows(), rows(), rows());
    let bf16 = KvFormat::Bf16.codec(d, CodeLayout::CpuTile)?;
    let mut baseline = std::collections::HashMap::new();
    for format in formats.as_deref().unwrap_or("bf16,oscar2,oscar4,oscar3,oscar1").split(',') {
        let codec = format.parse::<KvFormat>()?.codec(d, CodeLayout::CpuTile)?;
        let mut page = vec![0; codec.page_bytes()];
        codec.encode(&keys, &values, &mut page)?;
        for tokens in [32 * 1024, 128 * 1024] {
            let copies = (TOKENS_A_RUN / tokens).max(threads.min(4));
            let pages_each = tokens / PAGE_TOKENS + 1;
            let memory = Pool::new(&page, copies * pages_each);
            for shuffled in [false, true] {
                let mut pages = memory.pages();
                if shuffled {
                    let mut random = Random(42);
                    (1..pages.len()).rev().for_each(|i| pages.swap(i, random.next() as usize % (i + 1)));
                }
                // Everything but the newest tile is read through the coded side; for BF16 both are the same.
                let windows = Windows::new(0, 1)?;
                let mut tail = vec![0; bf16.page_bytes()];
                bf16.encode(&keys, &values, &mut tail)?;
                let mut full: Vec<Option<&[u8]>> = vec![None; pages_each];
                full[tokens / PAGE_TOKENS] = Some(&tail);
                let contexts: Vec<PagedContext<'_>> = pages
                    .chunks_exact(pages_each)
                    .map(|coded| PagedContext { full_codec: &bf16, coded_codec: &codec, full: &full, coded })
                    .collect();
                for &group in &groups {
                    let mut outs = vec![0.0; copies * group * d];
                    let positions = vec![tokens as u32; group];
                    let mut scratch = Scratch::new(precision);
                    let mut best = f64::INFINITY;
                    for _ in 0..15 {
                        let mut tasks: Vec<AttendTask<'_>> = contexts
                            .iter()
                            .zip(outs.chunks_exact_mut(group * d))
                            .map(|(context, out)| AttendTask {
                                queries: &queries[..group * d],
                                positions: &positions,
                                scale: 1.0 / (d as f32).sqrt(),
                                windows: &windows,
                                context,
                                out,
                            })
                            .collect();
                        let start = Instant::now();
                        attend(variant, &pool, &mut tasks, &mut scratch);
                        best = best.min(start.elapsed().as_secs_f64());
                    }
                    let rate = (copies * tokens) as f64 / best / 1e6;
                    let gbps = rate * 1e6 * codec.page_bytes() as f64 / PAGE_TOKENS as f64 / 1e9;
                    let base = *baseline.entry((tokens, shuffled, group)).or_insert(rate);
                    println!(
                        "{format:<8} {:<30} {tokens:>7} {group:>5} {:>9} {rate:>9.1} {gbps:>7.2} {:>8.1}% {:>8.2}",
                        kernel_name(variant, &codec),
                        if shuffled { "shuffled" } else { "in order" },
                        100.0 * gbps / ceiling,
                        rate / base
                    );
                }
            }
        }
    }
    if formats.is_some() {
        return Ok(());
    }
    prefill(variant, &pool, d)?;
    demotion(variant, d, &keys, &values)
}

/// A chunk of 256 tokens, four heads a token, at the end of 8K tokens.
fn prefill(variant: Variant, pool: &ThreadPool, d: usize) -> Result<(), Box<dyn std::error::Error>> {
    let (tokens, chunk, group) = (8192, 256, 4);
    let mut random = Random(7);
    let mut rows = |n: usize| (0..n * d).map(|_| random.uniform()).collect::<Vec<f32>>();
    let bf16 = KvFormat::Bf16.codec(d, CodeLayout::CpuTile)?;
    let queries = rows(chunk * group);
    let (keys, values) = (rows(PAGE_TOKENS), rows(PAGE_TOKENS));
    for format in ["bf16", "oscar2"] {
        let codec = format.parse::<KvFormat>()?.codec(d, CodeLayout::CpuTile)?;
        let (mut full_page, mut page) = (vec![0; bf16.page_bytes()], vec![0; codec.page_bytes()]);
        bf16.encode(&keys, &values, &mut full_page)?;
        codec.encode(&keys, &values, &mut page)?;
        let (full, coded) = (vec![Some(&full_page[..]); tokens / 64], vec![Some(&page[..]); tokens / 64]);
        let context = PagedContext { full_codec: &bf16, coded_codec: &codec, full: &full, coded: &coded };
        let positions: Vec<u32> =
            (0..chunk * group).map(|row| (tokens - chunk + row / group) as u32).collect();
        let mut out = vec![0.0; queries.len()];
        let mut scratch = Scratch::default();
        let mut best = f64::INFINITY;
        for _ in 0..15 {
            let task = AttendTask {
                queries: &queries,
                positions: &positions,
                scale: 1.0 / (d as f32).sqrt(),
                windows: &Windows::default(),
                context: &context,
                out: &mut out,
            };
            let start = Instant::now();
            attend(variant, pool, &mut [task], &mut scratch);
            best = best.min(start.elapsed().as_secs_f64());
        }
        let pairs = (chunk * group * (tokens - chunk / 2)) as f64;
        println!(
            "prefill {format}: {:.1} ms, {:.0} M query-token pairs a second",
            best * 1e3,
            pairs / best / 1e6
        );
    }
    Ok(())
}

/// Time to store a row in BF16 and to turn a tile of rows into codes, per row (a key and a value are two rows).
fn demotion(
    variant: Variant,
    d: usize,
    keys: &[f32],
    values: &[f32],
) -> Result<(), Box<dyn std::error::Error>> {
    let bf16 = KvFormat::Bf16.codec(d, CodeLayout::CpuTile)?;
    let mut full = vec![0; bf16.page_bytes()];
    let best = |work: &mut dyn FnMut()| {
        (0..200).fold(f64::INFINITY, |best, _| {
            let start = Instant::now();
            work();
            best.min(start.elapsed().as_secs_f64())
        })
    };
    let append = best(&mut || append_rows(&bf16, &mut full, 0, keys, values).expect("sizes fit"));
    println!("append: {:.0} ns a row", append * 1e9 / (2 * PAGE_TOKENS) as f64);
    for format in ["oscar1", "oscar2", "oscar3", "oscar4", "oscar2-lloyd"] {
        let codec = format.parse::<KvFormat>()?.codec(d, CodeLayout::CpuTile)?;
        let mut page = vec![0; codec.page_bytes()];
        let time = best(&mut || {
            for tile in 0..4 {
                demote_tile(variant, &bf16, &full, &codec, &mut page, tile).expect("sizes fit");
            }
        });
        println!("demote to {format}: {:.0} ns a row", time * 1e9 / (2 * PAGE_TOKENS) as f64);
    }
    Ok(())
}
