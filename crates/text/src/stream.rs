//! Streaming detokenizer: token ids in, text that can no longer change out.
//!
//! Invariant: the pieces, flushed at the end, concatenate to exactly [`Tokenizer::decode`] of the
//! whole sequence; no piece holds part of a UTF-8 sequence, and none is ever taken back. The work
//! for a token does not grow with the number of tokens before it.
//!
//! There are two methods. In a byte-level vocabulary a token is a byte string, so the decoder keeps
//! at most three bytes of an unfinished character and nothing else. In any other vocabulary a
//! token's text can depend on its neighbours (spaces joined or stripped), so a short window is
//! decoded twice, with and without the new tokens, and the difference is the new text.

use crate::TextError;
use crate::tokenizer::{ByteRule, Tokenizer};

/// Already emitted tokens that the window keeps as context. One is enough for the decoders known
/// today; a few more allow for decoders that strip several leading characters.
const CONTEXT: usize = 4;

/// In a mixed decoder chain, tokens that may be held back because the text ends in U+FFFD. A
/// character has at most four bytes, so past this the bytes are invalid, not unfinished. Here alone
/// the stream may differ from the whole, in the number of U+FFFD that a long row of invalid bytes
/// becomes.
const MIXED_HOLD: usize = 8;

/// Turns one request's token ids into text, piece by piece.
#[derive(Debug)]
pub struct StreamDecoder {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// Special tokens that are text all the same.
    kept: Vec<u32>,
    /// Byte-level method: the unfinished tail of the bytes so far.
    bytes: Vec<u8>,
    /// Window method: context first, then the tokens whose text is still held back.
    window: Vec<u32>,
    context: usize,
}

impl StreamDecoder {
    /// `skip_special` leaves special tokens out of the text, as in [`Tokenizer::decode`].
    pub fn new(tokenizer: &Tokenizer, skip_special: bool) -> Self {
        Self {
            tokenizer: tokenizer.clone(),
            skip_special,
            kept: Vec::new(),
            bytes: Vec::new(),
            window: Vec::with_capacity(2 * CONTEXT),
            context: 0,
        }
    }

    /// Leaves these special tokens in the text, as the markup of tool calls needs it. Unknown ones
    /// are ignored.
    pub fn keeping(mut self, tokens: &[&str]) -> Self {
        let ids = tokens.iter().filter_map(|token| self.tokenizer.token_to_id(token));
        self.kept = ids.filter(|&id| self.tokenizer.is_special(id)).collect();
        self
    }

    /// Takes the next token and returns the text that is certain now; it may be empty.
    pub fn push(&mut self, id: u32) -> Result<String, TextError> {
        let token = self.tokenizer.id_to_token(id).ok_or_else(|| self.tokenizer.unknown(id))?;
        if self.skip_special && self.tokenizer.is_special(id) {
            return match self.kept.contains(&id) {
                true => Ok(self.flush()? + &token),
                false => Ok(String::new()),
            };
        }
        let rule = self.tokenizer.byte_rule();
        if rule == ByteRule::ByteLevel {
            push_token_bytes(&token, &mut self.bytes);
            return Ok(take_certain(&mut self.bytes));
        }
        self.window.push(id);
        // One bad byte makes the decoder reject its whole run of byte tokens, so no byte of a run
        // is certain before the run ends.
        if rule == (ByteRule::Pieces { byte_fallback: true }) && is_byte_token(&token) {
            return Ok(String::new());
        }
        let (before, after) = self.window_texts()?;
        let held = self.window.len() - self.context;
        if rule == ByteRule::Mixed && after.ends_with('\u{FFFD}') && held < MIXED_HOLD {
            return Ok(String::new());
        }
        let surplus = self.window.len().saturating_sub(CONTEXT);
        self.window.drain(..surplus);
        self.context = self.window.len();
        Ok(added_text(&before, after))
    }

    /// Ends the stream: returns the text that was held back, with unfinished bytes as U+FFFD. The
    /// decoder can then serve another sequence.
    pub fn flush(&mut self) -> Result<String, TextError> {
        let (before, after) = self.window_texts()?;
        self.window.clear();
        self.context = 0;
        let bytes = std::mem::take(&mut self.bytes);
        Ok(added_text(&before, after) + &String::from_utf8_lossy(&bytes))
    }

    /// Text of the context alone, and of the whole window.
    fn window_texts(&self) -> Result<(String, String), TextError> {
        let before = self.tokenizer.decode_known(&self.window[..self.context], self.skip_special)?;
        let after = self.tokenizer.decode_known(&self.window, self.skip_special)?;
        Ok((before, after))
    }
}

/// The part of `after` beyond `before`. If a decoder rewrote the context itself, nothing can be
/// sent.
fn added_text(before: &str, mut after: String) -> String {
    if after.is_char_boundary(before.len()) { after.split_off(before.len()) } else { String::new() }
}

/// The rule by which the `tokenizers` decoder recognises a byte token such as `<0x0A>`.
pub(crate) fn is_byte_token(token: &str) -> bool {
    token.len() == 6
        && token.starts_with("<0x")
        && token.ends_with('>')
        && u8::from_str_radix(&token[3..5], 16).is_ok()
}

/// Appends the bytes of a byte-level token. A token with any character outside the byte alphabet
/// (an added token, such as one with a space) stands for its own UTF-8.
pub(crate) fn push_token_bytes(token: &str, bytes: &mut Vec<u8>) {
    let start = bytes.len();
    for c in token.chars() {
        match byte_of(c) {
            Some(byte) => bytes.push(byte),
            None => {
                bytes.truncate(start);
                bytes.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

/// The byte that a character of the byte-level alphabet stands for: printable Latin-1 stands for
/// itself, the 68 remaining bytes follow in order from U+0100.
fn byte_of(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// Removes and returns all text up to an unfinished sequence at the end.
fn take_certain(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut rest = bytes.as_slice();
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                rest = &[];
                break;
            }
            Err(error) => {
                let (valid, tail) = rest.split_at(error.valid_up_to());
                text.push_str(&String::from_utf8_lossy(valid));
                match error.error_len() {
                    Some(bad) => {
                        text.push('\u{FFFD}');
                        rest = &tail[bad..];
                    }
                    None => {
                        rest = tail;
                        break;
                    }
                }
            }
        }
    }
    let done = bytes.len() - rest.len();
    bytes.drain(..done);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_alphabet_is_a_bijection() {
        let mut seen = [false; 256];
        for code in 0..0x200 {
            if let Some(byte) = char::from_u32(code).and_then(byte_of) {
                assert!(!std::mem::replace(&mut seen[usize::from(byte)], true), "byte {byte} twice");
            }
        }
        assert!(seen.iter().all(|&seen| seen));
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
    }

    #[test]
    fn unfinished_sequences_stay_and_invalid_ones_become_one_mark() {
        let mut bytes = vec![b'a', 0xF0, 0x9F];
        assert_eq!(take_certain(&mut bytes), "a");
        assert_eq!(bytes, [0xF0, 0x9F]);
        bytes.extend([0x98, 0x80]);
        assert_eq!(take_certain(&mut bytes), "😀");
        assert!(bytes.is_empty());
        bytes.extend([0xE4, 0xBD, b'x', 0xFF]);
        assert_eq!(take_certain(&mut bytes), "\u{FFFD}x\u{FFFD}");
    }

    #[test]
    fn byte_tokens_are_recognised_as_the_decoder_does() {
        assert!(is_byte_token("<0x0A>") && is_byte_token("<0xff>"));
        assert!(!is_byte_token("<0xGG>") && !is_byte_token("<0x0>") && !is_byte_token("<0xé>"));
    }
}
