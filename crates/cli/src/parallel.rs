//! A model over several ranks: the flag, the devices behind it, and what they take.

use crate::device::AnyBackend;
use crate::options::{Device, ModelArgs, PrecisionArg, at_least_one};
use crate::sizing::FixedMemory;
use anyhow::{Result, bail};
use oscar_backend::StepMemory;
use oscar_kernels_cpu::ThreadRank;
use oscar_models::{DecoderConfig, Holding, Shard};
use oscar_runner::Ranks;
use serde::Serialize;

#[derive(clap::Args, Clone, Serialize)]
pub struct ParallelArgs {
    /// Ranks that share the model: each has its own threads, and its part of the heads, the
    /// feed-forward columns or experts, the vocabulary and the KV pages. N divides the number of KV heads. CPU
    /// only
    #[arg(long, value_name = "N", value_parser = at_least_one, default_value_t = 1)]
    pub tensor_parallel: usize,
}

impl ParallelArgs {
    /// The devices of all ranks. They divide the threads that one would have.
    ///
    /// # Errors
    /// If this model or this device cannot be split so; says what would work.
    pub fn ranks(&self, model: &ModelArgs, config: &DecoderConfig) -> Result<Ranks<AnyBackend>> {
        let count = self.tensor_parallel;
        if count == 1 {
            return Ok(model.backend()?.into());
        }
        Shard::new(0, count, config)?;
        let gpu = match model.device {
            Device::Cuda => true,
            Device::Auto => model.precision != PrecisionArg::F32 && AnyBackend::cuda_if_usable().is_some(),
            Device::Cpu => false,
        };
        if gpu {
            bail!(
                "--tensor-parallel {count} works on the CPU only: ranks on several GPUs (NCCL) were never run \
                 together; use --device cpu or leave it out"
            );
        }
        let threads = (model.cpu_threads()? / count).max(1);
        let ranks: Result<Vec<AnyBackend>> = ThreadRank::all(count)
            .into_iter()
            .map(|rank| Ok(AnyBackend::Cpu(Box::new(model.cpu(threads)?.with_communicator(rank)))))
            .collect();
        Ok(Ranks::try_from(ranks?)?)
    }

    /// Refuses a flag that does not work on several ranks.
    pub fn refuse(&self, flag: &str, given: bool) -> Result<()> {
        if given && self.tensor_parallel > 1 {
            bail!("{flag} does not work with --tensor-parallel yet: leave one of them out");
        }
        Ok(())
    }

    /// Memory of all ranks together: each has the embedding, and rows of its own in a step.
    pub fn fixed_memory(&self, whole: FixedMemory, config: &DecoderConfig, holding: Holding) -> FixedMemory {
        let ranks = self.tensor_parallel;
        if ranks == 1 {
            return whole;
        }
        let table = config.vocab_size * config.hidden_size * holding.element_bytes;
        // A tied head is cut out of the embedding.
        let copies = ranks - 1 + usize::from(config.tie_word_embeddings);
        let StepMemory { activations, expanded_pages, products, rope } = whole.step;
        FixedMemory {
            weights: whole.weights + copies * table,
            host: whole.host,
            step: StepMemory {
                activations: ranks * activations,
                expanded_pages: ranks * expanded_pages,
                products: ranks * products,
                rope: ranks * rope,
            },
        }
    }
}
