//! Tokens as text and bytes, the way log-probabilities are reported.
//!
//! Invariant: a number that JSON cannot hold (minus infinity) becomes [`FLOOR`], as other servers do.

use oscar_engine::TokenLogprobs;
use oscar_text::Tokenizer;
use serde_json::{Map, Value, json};

/// Most alternatives a client may ask for at each token.
pub const MAX_LOGPROBS: i64 = 20;

/// What stands for "impossible".
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

    fn entry(&self, token: u32, logprob: f32) -> Value {
        let text = self.text(token);
        let bytes = self.bytes(token, &text);
        json!({"token": text, "logprob": finite(logprob), "bytes": bytes})
    }

    /// An item of `choices[].logprobs.content` of a chat.
    pub fn chat_entry(&self, logprobs: &TokenLogprobs) -> Value {
        let mut entry = self.entry(logprobs.token, logprobs.logprob);
        let top: Vec<Value> =
            logprobs.top.iter().map(|&(token, logprob)| self.entry(token, logprob)).collect();
        entry["top_logprobs"] = Value::Array(top);
        entry
    }

    /// An item of `top_logprobs` of a plain completion: text to number, the chosen token always among them.
    pub fn completion_entry(&self, logprobs: &TokenLogprobs) -> Value {
        let mut entry = Map::new();
        for &(token, logprob) in logprobs.top.iter().chain([&(logprobs.token, logprobs.logprob)]) {
            entry.entry(self.text(token)).or_insert_with(|| json!(finite(logprob)));
        }
        Value::Object(entry)
    }

    /// `prompt_logprobs`: for each token an object from token id to number and text, null for the first.
    pub fn prompt_logprobs(&self, tokens: &[Option<TokenLogprobs>]) -> Value {
        tokens.iter().map(|token| token.as_ref().map(|logprobs| self.prompt_entry(logprobs))).collect()
    }

    fn prompt_entry(&self, logprobs: &TokenLogprobs) -> Value {
        let mut entry = Map::new();
        let ranked = logprobs.top.iter().enumerate().map(|(index, top)| (Some(index + 1), top));
        for (rank, &(token, logprob)) in ranked.chain([(None, &(logprobs.token, logprobs.logprob))]) {
            entry.entry(token.to_string()).or_insert_with(
                || json!({"logprob": finite(logprob), "rank": rank, "decoded_token": self.text(token)}),
            );
        }
        Value::Object(entry)
    }
}

pub fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { FLOOR }
}

/// Bytes of a token from its spelling in the vocabulary: `<0xE2>`, or the byte-level alphabet, in which the 68
/// bytes that do not print stand, in order, from U+0100.
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
