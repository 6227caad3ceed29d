//! The vocabulary as bytes, in the form that the grammar parser walks.

use std::sync::Arc;

use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{ParserFactory, earley::SlicedBiasComputer};

use crate::{TextError, Tokenizer};

/// Most ways to go on at one place of an answer. An object with [`MAX_OPTIONAL`] optional members
/// needs about four for each. The parser makes some 20,000 in a millisecond.
///
/// [`MAX_OPTIONAL`]: super::size::MAX_OPTIONAL
const MAX_ITEMS: usize = 10_000;

/// Our tokenizer as the parser knows it.
struct Environment {
    trie: TokTrie,
    tokenizer: Tokenizer,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        // Text that spells a special token must not become that token.
        let own = |text: &str| {
            let ids = self.tokenizer.encode(text, false).ok()?;
            let same = self.trie.decode(&ids) == text.as_bytes();
            (same && !ids.iter().any(|&id| self.tokenizer.is_special(id))).then_some(ids)
        };
        std::str::from_utf8(bytes).ok().and_then(own).unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
    }
}

pub(super) fn factory(
    tokenizer: &Tokenizer,
    vocab_size: usize,
    end_tokens: &[u32],
) -> Result<ParserFactory, TextError> {
    let unusable = |reason: String| TextError::Grammar { reason };
    let Some(&first_end) = end_tokens.first() else {
        return Err(unusable("the model has no end token, which a constrained answer needs".to_owned()));
    };
    let vocab_size = vocab_size.max(tokenizer.vocab_size());
    let count = u32::try_from(vocab_size).map_err(|error| unusable(error.to_string()))?;
    let words: Vec<Vec<u8>> = (0..count).map(|id| word(tokenizer, id)).collect();
    let trie = TokTrie::from(&TokRxInfo::new(count, first_end), &words).with_eos_tokens(end_tokens);
    let environment: TokEnv = Arc::new(Environment { trie, tokenizer: tokenizer.clone() });
    let slices = SlicedBiasComputer::general_slices();
    let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
        .map_err(|error| unusable(error.to_string()))?;
    factory.quiet();
    let limits = factory.limits_mut();
    limits.verbose_errors = false;
    limits.max_items_in_row = MAX_ITEMS;
    limits.step_max_items = 25 * MAX_ITEMS;
    Ok(factory)
}

/// The bytes of a token; none for ids without a token. A special token is marked, so that no text
/// matches it.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    match tokenizer.token_bytes(id) {
        Some(bytes) if tokenizer.is_special(id) => {
            [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes.as_slice()].concat()
        }
        Some(bytes) => bytes,
        None => Vec::new(),
    }
}
