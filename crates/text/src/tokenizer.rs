//! The tokenizer: text to ids and back, around the `tokenizers` crate.
//!
//! Invariant: an id outside the vocabulary is an error, never silently dropped; truncation and
//! padding that a `tokenizer.json` may carry from training are switched off, so that ids depend on
//! the text alone.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use tokenizers::{AddedToken, DecoderWrapper};

use crate::stream::{is_byte_token, push_token_bytes};
use crate::{SpecialTokens, TextError, TokenizerConfig};

/// A tokenizer; clones are cheap and share the vocabulary.
#[derive(Clone)]
pub struct Tokenizer {
    shared: Arc<Shared>,
}

struct Shared {
    inner: tokenizers::Tokenizer,
    special: SpecialTokens,
    special_ids: HashSet<u32>,
    added_ids: HashSet<u32>,
    byte_rule: ByteRule,
    most_bytes: usize,
}

/// How tokens of this vocabulary may hold pieces of a UTF-8 sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ByteRule {
    /// Byte-level BPE: every token is a byte string, text is their concatenation.
    ByteLevel,
    /// Tokens are text; `<0xNN>` tokens, where the decoder knows them, are single bytes.
    Pieces { byte_fallback: bool },
    /// A byte-level step inside a longer chain of decoders.
    Mixed,
}

impl Tokenizer {
    /// Builds a tokenizer from the bytes of `tokenizer.json`.
    /// A file that makes the library panic is refused like any other that cannot be used.
    pub fn from_json(tokenizer_json: &[u8], config: &TokenizerConfig) -> Result<Self, TextError> {
        let built = caught(|| {
            let tokenizer = Self::build(tokenizer_json, config)?;
            tokenizer.try_out()?;
            Ok(tokenizer)
        });
        built.unwrap_or_else(|reason| Err(TextError::TokenizerJson { reason }))
    }

    /// Encodes and decodes a little, so that a file whose parts do not fit together is noticed at once.
    fn try_out(&self) -> Result<(), TextError> {
        let ids = self.encode("The quick brown fox\n 12", true)?;
        self.decode(&ids, true)?;
        self.decode(&ids, false)?;
        Ok(())
    }

    fn build(tokenizer_json: &[u8], config: &TokenizerConfig) -> Result<Self, TextError> {
        let unusable = |error: tokenizers::Error| TextError::TokenizerJson { reason: error.to_string() };
        let mut inner = tokenizers::Tokenizer::from_bytes(tokenizer_json).map_err(unusable)?;
        inner.with_truncation(None).map_err(unusable)?;
        inner.with_padding(None);

        // Tokens that the configuration calls special must be skipped and matched as special even
        // if tokenizer.json does not mark them. Unknown ones are left out: their ids would lie past
        // the embedding.
        let special = config.special.clone();
        let declared: Vec<AddedToken> = special
            .named()
            .map(|(_, token)| token)
            .chain(special.additional().iter().map(String::as_str))
            .filter(|token| inner.token_to_id(token).is_some())
            .filter(|token| !inner.get_added_vocabulary().is_special_token(token))
            .map(|token| AddedToken::from(token, true))
            .collect();
        inner.add_special_tokens(declared).map_err(unusable)?;

        let added = inner.get_added_tokens_decoder();
        let special_ids = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        let added_ids = added.into_keys().collect();
        let byte_rule = byte_rule(inner.get_decoder());
        let most_bytes = most_bytes(&inner);
        let shared = Shared { inner, special, special_ids, added_ids, byte_rule, most_bytes };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Token ids of `text`. Special tokens written out in the text (`<|im_end|>`) become their
    /// single id; `add_special` also adds the model's own special tokens, such as a leading BOS.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        let failed = |reason| TextError::Encode { bytes: text.len(), reason };
        // The library panics where its regular expressions give up, for example on millions of spaces.
        let encoding = caught(|| self.shared.inner.encode_fast(text, add_special)).map_err(failed)?;
        Ok(encoding.map_err(|error| failed(error.to_string()))?.get_ids().to_vec())
    }

    /// As [`Self::encode`], but a text of far more than `most` tokens is refused after work for about `most` of them.
    pub fn encode_at_most(&self, text: &str, add_special: bool, most: usize) -> Result<Vec<u32>, TextError> {
        const PIECE: usize = 64 << 10;
        // A token is at least a byte, so shorter texts need no count.
        if text.len() > most.max(PIECE) {
            // Cutting changes tokens at the cuts: a quarter more is far above what that can add.
            let limit = most + most / 4;
            let (mut counted, mut rest) = (0, text);
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(rest.floor_char_boundary(PIECE));
                counted += self.encode(piece, false)?.len();
                if counted > limit {
                    return Err(TextError::TooManyTokens { bytes: text.len(), most });
                }
                rest = after;
            }
        }
        self.encode(text, add_special)
    }

    /// The bytes of `text` that each token of [`Self::encode`] stands for.
    pub fn offsets(&self, text: &str, add_special: bool) -> Result<Vec<Range<usize>>, TextError> {
        let failed = |reason| TextError::Encode { bytes: text.len(), reason };
        let encoding = caught(|| self.shared.inner.encode(text, add_special)).map_err(failed)?;
        let encoding = encoding.map_err(|error| failed(error.to_string()))?;
        Ok(encoding.get_offsets().iter().map(|&(start, end)| start..end).collect())
    }

    /// Bytes of text that one token stands for at most.
    pub fn most_bytes_per_token(&self) -> usize {
        self.shared.most_bytes
    }

    /// Text of `ids`, all at once. Bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        if let Some(&id) = ids.iter().find(|&&id| !self.contains(id)) {
            return Err(self.unknown(id));
        }
        self.decode_known(ids, skip_special)
    }

    /// Number of tokens, the added ones included.
    pub fn vocab_size(&self) -> usize {
        self.shared.inner.get_vocab_size(true)
    }

    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.shared.inner.token_to_id(token)
    }

    /// The vocabulary's spelling of a token (`Ġthe`, `<0x0A>`), which is not yet text.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.shared.inner.id_to_token(id)
    }

    /// The bytes that a token adds to a text; those of its name for an added token. In vocabularies
    /// of pieces the leading space of a word is one of them.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let token = self.id_to_token(id)?;
        if self.shared.added_ids.contains(&id) {
            return Some(token.into_bytes());
        }
        let mut bytes = Vec::new();
        match self.shared.byte_rule {
            ByteRule::ByteLevel | ByteRule::Mixed => push_token_bytes(&token, &mut bytes),
            ByteRule::Pieces { byte_fallback: true } if is_byte_token(&token) => {
                bytes.push(u8::from_str_radix(&token[3..5], 16).ok()?);
            }
            ByteRule::Pieces { .. } => bytes = token.replace('\u{2581}', " ").into_bytes(),
        }
        Some(bytes)
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.shared.special_ids.contains(&id)
    }

    pub fn special(&self) -> &SpecialTokens {
        &self.shared.special
    }

    pub(crate) fn byte_rule(&self) -> ByteRule {
        self.shared.byte_rule
    }

    /// Decodes ids that the caller has already checked.
    pub(crate) fn decode_known(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        // Some decoders of the library panic on an empty list of tokens.
        if skip_special && ids.iter().all(|&id| self.is_special(id)) || ids.is_empty() {
            return Ok(String::new());
        }
        let failed = |reason| TextError::Decode { tokens: ids.len(), reason };
        let decoded = caught(|| self.shared.inner.decode(ids, skip_special)).map_err(failed)?;
        decoded.map_err(|error| failed(error.to_string()))
    }

    pub(crate) fn unknown(&self, id: u32) -> TextError {
        TextError::UnknownToken { id, vocab_size: self.vocab_size() }
    }

    fn contains(&self, id: u32) -> bool {
        self.shared.inner.id_to_token(id).is_some()
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("special", self.special())
            .field("byte_rule", &self.shared.byte_rule)
            .finish()
    }
}

/// Turns a panic of the library into words. What it works on is rebuilt or read-only, so nothing is left half done.
fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        format!("the tokenizer library panicked: {}", text.unwrap_or("no message"))
    })
}

/// The longest spelling in the vocabulary: a byte has a spelling of at least a byte. Where text is normalized first it
/// may shrink, by a factor of 3 when characters are composed.
fn most_bytes(inner: &tokenizers::Tokenizer) -> usize {
    let longest = inner.get_vocab(true).keys().map(String::len).max().unwrap_or(1).max(1);
    longest * if inner.get_normalizer().is_some() { 3 } else { 1 }
}

fn byte_rule(decoder: Option<&DecoderWrapper>) -> ByteRule {
    let steps: &[DecoderWrapper] = match decoder {
        None => &[],
        Some(DecoderWrapper::Sequence(sequence)) => sequence.get_decoders(),
        Some(single) => std::slice::from_ref(single),
    };
    match steps {
        [DecoderWrapper::ByteLevel(_)] => ByteRule::ByteLevel,
        _ if steps
            .iter()
            .any(|step| matches!(step, DecoderWrapper::ByteLevel(_) | DecoderWrapper::Sequence(_))) =>
        {
            ByteRule::Mixed
        }
        _ => ByteRule::Pieces {
            byte_fallback: steps.iter().any(|step| matches!(step, DecoderWrapper::ByteFallback(_))),
        },
    }
}
