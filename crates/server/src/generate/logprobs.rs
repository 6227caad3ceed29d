//! Tokens as text and bytes, the way log-probabilities are reported.
//!
//! Invariant: a number that JSON cannot hold (minus infinity) becomes [`FLOOR`], as other servers
//! do.

use oscar_engine::TokenLogprobs;
use oscar_text::Tokenizer;
use serde::{Serialize, Serializer};

/// Most alternatives a client may ask for at each token.
pub const MAX_LOGPROBS: i64 = 20;

/// The value reported for probability zero.
const FLOOR: f32 = -9999.0;

/// Spells tokens out.
#[derive(Clone, Debug)]
pub struct TokenTexts {
    tokenizer: Tokenizer,
}

impl TokenTexts {
    pub fn new(tokenizer: &Tokenizer) -> Self {
        Self { tokenizer: tokenizer.clone() }
    }

    /// The token alone; part of a character becomes U+FFFD.
    pub fn text(&self, token: u32) -> String {
        self.tokenizer.decode(&[token], false).unwrap_or_default()
    }

    /// The token's bytes, exact where the vocabulary tells them.
    fn bytes(&self, token: u32, text: &str) -> Vec<u8> {
        if text.contains('\u{FFFD}')
            && let Some(bytes) =
                self.tokenizer.id_to_token(token).and_then(|spelling| spelled_bytes(&spelling))
        {
            return bytes;
        }
        text.as_bytes().to_vec()
    }

    /// An item of `choices[].logprobs.content` of a chat.
    pub fn chat_entry(&self, logprobs: TokenLogprobs) -> ChatEntry {
        ChatEntry { texts: self.clone(), logprobs }
    }

    /// An item of `top_logprobs` of a plain completion.
    pub fn completion_entry(&self, logprobs: TokenLogprobs) -> TopLogprobs {
        TopLogprobs { texts: self.clone(), logprobs }
    }

    pub fn prompt_logprobs(&self, tokens: Vec<Option<TokenLogprobs>>) -> PromptLogprobs {
        PromptLogprobs { texts: self.clone(), tokens }
    }
}

/// A token with its bytes and alternatives; spelled out when it is written.
#[derive(Clone, Debug)]
pub struct ChatEntry {
    texts: TokenTexts,
    logprobs: TokenLogprobs,
}

#[derive(Serialize)]
struct Spelled {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<Spelled>>,
}

impl Spelled {
    fn new(texts: &TokenTexts, token: u32, logprob: f32, top_logprobs: Option<Vec<Self>>) -> Self {
        let text = texts.text(token);
        Self { bytes: texts.bytes(token, &text), token: text, logprob: finite(logprob), top_logprobs }
    }
}

impl Serialize for ChatEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let TokenLogprobs { token, logprob, top } = &self.logprobs;
        let top = top.iter().map(|&(token, logprob)| Spelled::new(&self.texts, token, logprob, None));
        Spelled::new(&self.texts, *token, *logprob, Some(top.collect())).serialize(serializer)
    }
}

/// Text to number, the chosen token always among them; spelled out when it is written.
#[derive(Clone, Debug)]
pub struct TopLogprobs {
    texts: TokenTexts,
    logprobs: TokenLogprobs,
}

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let TokenLogprobs { token, logprob, top } = &self.logprobs;
        let mut entries: Vec<(String, f32)> = Vec::with_capacity(top.len() + 1);
        for &(token, logprob) in top.iter().chain([&(*token, *logprob)]) {
            let text = self.texts.text(token);
            if !entries.iter().any(|(known, _)| *known == text) {
                entries.push((text, finite(logprob)));
            }
        }
        serializer.collect_map(entries)
    }
}

/// `prompt_logprobs`: for each token an object from token id to number and text, null for the
/// first; spelled out when it is written.
#[derive(Clone, Debug)]
pub struct PromptLogprobs {
    texts: TokenTexts,
    tokens: Vec<Option<TokenLogprobs>>,
}

impl Serialize for PromptLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let entry = |logprobs| PromptEntry { texts: &self.texts, logprobs };
        serializer.collect_seq(self.tokens.iter().map(|token| token.as_ref().map(entry)))
    }
}

struct PromptEntry<'a> {
    texts: &'a TokenTexts,
    logprobs: &'a TokenLogprobs,
}

#[derive(Serialize)]
struct Ranked {
    logprob: f32,
    rank: Option<usize>,
    decoded_token: String,
}

impl Serialize for PromptEntry<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let TokenLogprobs { token, logprob, top } = self.logprobs;
        let ranked =
            top.iter().enumerate().map(|(index, &(token, logprob))| (Some(index + 1), token, logprob));
        let known = top.iter().any(|(other, _)| other == token);
        let chosen = (!known).then_some((None, *token, *logprob));
        serializer.collect_map(ranked.chain(chosen).map(|(rank, token, logprob)| {
            let decoded_token = self.texts.text(token);
            (token.to_string(), Ranked { logprob: finite(logprob), rank, decoded_token })
        }))
    }
}

pub fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { FLOOR }
}

/// Bytes of a token from its spelling in the vocabulary: `<0xE2>`, or the byte-level alphabet, in
/// which the 68 bytes that do not print stand, in order, from U+0100.
fn spelled_bytes(spelling: &str) -> Option<Vec<u8>> {
    if let Some(hex) = spelling.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')) {
        return Some(vec![u8::from_str_radix(hex, 16).ok()?]);
    }
    spelling
        .chars()
        .map(|c| match u32::from(c) {
            code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => u8::try_from(code).ok(),
            code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
            code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
            0x143 => Some(0xAD),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_give_bytes() {
        assert_eq!(spelled_bytes("<0xE2>"), Some(vec![0xE2]));
        assert_eq!(spelled_bytes("ĠâĢ"), Some(vec![0x20, 0xE2, 0x80]));
        assert_eq!(spelled_bytes("ŃÃ"), Some(vec![0xAD, 0xC3]));
        assert_eq!(spelled_bytes("你"), None);
        assert_eq!(finite(f32::NEG_INFINITY), FLOOR);
    }
}
