//! What scorers learn while a prompt is computed: the attention of all its queries, and the mean
//! and covariance of the queries before RoPE.

use crate::scorers::scoring;
use oscar_backend::{Backend, Reduce, Result as BackendResult, Scoring, Tap, TappedRows};
use oscar_cache::view_end;
use oscar_models::RopeTable;
use oscar_runner::{Logits, Runner, Sequence, StepError, StepOutput, StepRequest, next_chunk};

/// Most queries of a prompt that enter the moments; they are taken at equal distances.
const SAMPLES: usize = 1024;

/// Mean and covariance of one query head, before RoPE.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QueryMoments {
    pub count: usize,
    pub sum: Vec<f64>,
    /// `Σ q qᵀ`, row-major.
    pub products: Vec<f64>,
}

/// What was seen while a sequence was computed from its start.
#[derive(Clone, Debug)]
pub struct Observed {
    attention: Scoring,
    /// By layer and query head.
    pub queries: Vec<QueryMoments>,
    len: usize,
}

impl Observed {
    /// The attention of all queries, if they were those of a sequence of this length.
    pub fn attention<B: Backend>(&self, _: &Runner<B>, len: usize) -> Result<&Scoring, StepError> {
        match len == self.len {
            true => Ok(&self.attention),
            false => Err(StepError::Eviction("another length of the sequence was observed")),
        }
    }
}

struct Observer<'a> {
    attention: &'a mut Scoring,
    queries: &'a mut [QueryMoments],
    rope: &'a RopeTable,
    heads: usize,
    width: usize,
    head_dim: usize,
    /// Rows of the step that enter the moments, and the position of its first row.
    rows: Vec<usize>,
    first_position: usize,
    buffer: Vec<f32>,
}

impl Tap for Observer<'_> {
    fn heads(&mut self, layer: usize, qkv: &mut dyn TappedRows) -> BackendResult<()> {
        if self.rows.is_empty() {
            return Ok(());
        }
        self.buffer.clear();
        qkv.read(&mut self.buffer)?;
        let d = self.head_dim;
        for &row in &self.rows {
            let values = &self.buffer[row * self.width..][..self.heads * d];
            let (cos, sin) =
                (self.rope.cos(self.first_position + row), self.rope.sin(self.first_position + row));
            let half = self.rope.half_dim();
            for (head, query) in values.chunks_exact(d).enumerate() {
                let mut query = query.to_vec();
                for i in 0..half {
                    let (a, b) = (query[i], query[i + half]);
                    let norm = cos[i] * cos[i] + sin[i] * sin[i];
                    query[i] = (a * cos[i] + b * sin[i]) / norm;
                    query[i + half] = (b * cos[i] - a * sin[i]) / norm;
                }
                self.queries[layer * self.heads + head].add(&query);
            }
        }
        Ok(())
    }

    fn attended(&mut self, _: usize, _: &mut dyn TappedRows) -> BackendResult<()> {
        Ok(())
    }

    fn scoring(&mut self) -> Option<&mut Scoring> {
        Some(self.attention)
    }
}

impl QueryMoments {
    fn add(&mut self, query: &[f32]) {
        let d = query.len();
        self.sum.resize(d, 0.0);
        self.products.resize(d * d, 0.0);
        self.count += 1;
        for (i, &a) in query.iter().enumerate() {
            self.sum[i] += f64::from(a);
            let row = &mut self.products[i * d..][..d];
            row.iter_mut().zip(query).for_each(|(p, &b)| *p += f64::from(a) * f64::from(b));
        }
    }
}

/// Computes a prompt into an empty sequence and looks at its attention and queries.
pub fn observe<B: Backend>(
    runner: &mut Runner<B>,
    sequence: &mut Sequence,
    tokens: &[u32],
) -> Result<Observed, StepError> {
    let config = runner.config().clone();
    let sink = runner.layout().windows().sink();
    let rope = RopeTable::new(&config.rope, config.rotary_width(), tokens.len().max(1));
    let mut attention = scoring(runner, tokens.len(), Reduce::Sum);
    let mut queries = vec![QueryMoments::default(); config.cache_layers() * config.query_heads];
    let distance = tokens.len().saturating_sub(sink).div_ceil(SAMPLES).max(1);
    let mut out = StepOutput::default();
    let until = view_end(runner.layout(), tokens.len());
    let mut done = 0;
    while done < tokens.len() {
        let end = done + next_chunk(tokens.len() - done, runner.prefill_chunk());
        attention.queries = 0..end - done;
        // Rows that do not exist yet are not scored.
        attention.until = until.min(end);
        let mut observer = Observer {
            attention: &mut attention,
            queries: &mut queries,
            rope: &rope,
            heads: config.query_heads,
            width: config.query_width() + 2 * config.kv_width(),
            head_dim: config.head_dim,
            rows: (0..end - done)
                .filter(|row| done + row >= sink && (done + row - sink).is_multiple_of(distance))
                .collect(),
            first_position: done,
            buffer: Vec::new(),
        };
        let request =
            StepRequest { sequence: &mut *sequence, tokens: &tokens[done..end], logits: Logits::None };
        runner.tapped_step(&mut [request], &mut out, Some(&mut observer))?;
        done = end;
    }
    attention.until = until;
    Ok(Observed { attention, queries, len: tokens.len() })
}
