//! The model that a benchmark serves: one from files, or random weights of a published shape.

use crate::cache::Cache;
use crate::cpu_experts::{self, WeightBytes};
use crate::device::AnyBackend;
use crate::options::{CacheArgs, ModelArgs, OpenModel, WeightsArg};
use anyhow::{Context, Result, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use oscar_backend::WeightFormat;
use oscar_codec::{CodeLayout, KvFormat, RotationKind, RotationSet};
use oscar_eval::Forms;
use oscar_models::{DecoderConfig, ModelSource, shapes};
use oscar_runner::{Ranks, Runner, RunnerOptions};
use oscar_text::ModelText;

/// The value of `--shape`.
#[derive(Clone, Debug)]
pub struct Shape {
    pub name: String,
    pub config: DecoderConfig,
}

/// Reads `--shape`. The help text lists the names.
pub fn shape_parser() -> impl TypedValueParser<Value = Shape> {
    PossibleValuesParser::new(shapes::NAMES).try_map(|name| {
        let config = shapes::shape(&name).ok_or("no shape has this name")?;
        Ok::<_, &str>(Shape { name, config })
    })
}

pub enum Subject {
    Open(Box<OpenModel>),
    Random { shape: Box<Shape>, weights: WeightFormat, routing_skew: f32 },
}

impl Subject {
    pub fn open(model: &ModelArgs, shape: Option<&Shape>) -> Result<Self> {
        Ok(match shape {
            Some(shape) => {
                model.check_experts(&shape.config)?;
                let weights = model.weights.map_or(WeightFormat::Bf16, WeightsArg::format);
                Self::Random { shape: Box::new(shape.clone()), weights, routing_skew: 0.0 }
            }
            None => Self::Open(Box::new(model.open()?)),
        })
    }

    pub fn name(&self) -> &str {
        match self {
            Self::Open(model) => &model.name,
            Self::Random { shape, .. } => &shape.name,
        }
    }

    pub fn config(&self) -> &DecoderConfig {
        match self {
            Self::Open(model) => &model.config,
            Self::Random { shape, .. } => &shape.config,
        }
    }

    /// The text side, which random weights do not have.
    pub fn text(&self) -> Result<ModelText> {
        match self {
            Self::Open(model) => model.text(),
            Self::Random { .. } => bail!("--http needs a model with a tokenizer: leave --shape out"),
        }
    }

    /// Forms of answers. Random weights get the tokens of the embedded model, which are fewer than
    /// their vocabulary.
    pub fn forms(&self) -> Result<Forms> {
        let vocab_size = self.config().vocab_size;
        match self {
            Self::Open(model) => {
                let generation = model.generation()?;
                Ok(Forms::new(
                    &model.text()?.tokenizer,
                    vocab_size,
                    generation.stop_token_ids(&model.config),
                )?)
            }
            Self::Random { .. } => {
                let source = ModelSource::Embedded(oscar_embedded::FILES);
                let text = ModelText::from_files(&source.read_required("tokenizer.json")?, None, None)?;
                let end = text.tokenizer.encode("<|im_end|>", false)?;
                Ok(Forms::new(&text.tokenizer, vocab_size, &end)?)
            }
        }
    }

    /// The cache of a format. Random weights get Hadamard rotations.
    pub fn cache(&self, format: KvFormat, args: &CacheArgs) -> Result<Cache> {
        if let Self::Open(model) = self {
            return model.cache(format, args);
        }
        let (c, windows) = (self.config(), format.windows(args.sink, args.recent)?);
        let layout = c.cache_layout(format, windows, CodeLayout::Logical)?;
        let rotations = match format.rotation() {
            RotationKind::None => None,
            _ => Some(RotationSet::hadamard(c.cache_layers(), c.kv_heads, c.head_dim)?),
        };
        Ok(Cache { layout, rotations, rotation_origin: "Hadamard: the weights are random".into() })
    }

    /// Refuses contexts that the model cannot address.
    pub fn check_context(&self, context: usize) -> Result<()> {
        let limit = self.config().max_position_embeddings;
        if context > limit {
            bail!("{context} tokens are longer than the {limit} positions of {}", self.name());
        }
        Ok(())
    }

    pub fn runner(
        &self,
        cache: &Cache,
        ranks: impl Into<Ranks<AnyBackend>>,
        args: &CacheArgs,
        context: usize,
        sequences: usize,
    ) -> Result<Runner<AnyBackend>> {
        let ranks = ranks.into();
        match self {
            Self::Open(model) => cache.runner(model, ranks, args, context, sequences, |_| {}),
            Self::Random { shape, weights, routing_skew } => {
                let options = RunnerOptions {
                    layout: cache.layout.clone(),
                    rotations: cache.rotations.as_ref(),
                    context,
                    kv_memory: args.kv_memory(sequences, context),
                    prefill_chunk: args.prefill_chunk(ranks.lead(), &shape.config),
                };
                let bytes = WeightBytes::of_shape(&shape.config, *weights);
                cpu_experts::place(ranks.lead(), &shape.config, &bytes, &options, sequences)?;
                let runner = Runner::random(ranks, &shape.config, *weights, *routing_skew, options);
                runner.with_context(|| format!("random weights of {}", shape.name))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        model: ModelArgs,
        #[command(flatten)]
        cache: CacheArgs,
        #[arg(long, value_parser = shape_parser())]
        shape: Option<Shape>,
    }

    /// Layers without attention have no rows to rotate.
    #[test]
    fn rotations_of_every_shape_are_those_of_its_cache() {
        for name in shapes::NAMES {
            let flags = Flags::parse_from(["oscar", "--shape", name]);
            let subject = Subject::open(&flags.model, flags.shape.as_ref()).unwrap();
            let layers = subject.config().cache_layers();
            match subject.cache(KvFormat::OSCAR2, &flags.cache) {
                Ok(cache) => assert_eq!(cache.rotations.unwrap().layers(), layers, "{name}"),
                Err(error) => assert!(subject.config().latent.is_some(), "{name}: {error:#}"),
            }
        }
    }

    #[test]
    fn an_unknown_shape_gets_the_names_of_all() {
        let error = Flags::try_parse_from(["oscar", "--shape", "gpt-5"]).err().unwrap().to_string();
        assert!(shapes::NAMES.iter().all(|name| error.contains(name)), "{error}");
    }
}
