//! Everything that the bytes of a page depend on besides its tokens.

use sha2::{Digest, Sha256};
use std::fmt;

/// DO NOT CHANGE without a new number: it names the recipe and the format of stored pages.
const DOMAIN: &[u8] = b"oscar page store v1";

/// SHA-256 over named parts: weights, rotations, widths, windows, format, page order and device.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

/// Collects the parts of a fingerprint, and a text about them for people.
pub struct FingerprintParts {
    hasher: Sha256,
    about: String,
}

impl Default for FingerprintParts {
    fn default() -> Self {
        Self { hasher: Sha256::new_with_prefix(DOMAIN), about: String::new() }
    }
}

impl FingerprintParts {
    /// A part that people can read; it also goes into the text.
    #[must_use]
    pub fn text(self, name: &str, value: &str) -> Self {
        self.bytes(name, [value.as_bytes()]).note(name, value)
    }

    /// A line of the text that is no part of the fingerprint.
    #[must_use]
    pub fn note(mut self, name: &str, value: &str) -> Self {
        self.about.push_str(&format!("{name}: {}\n", value.replace('\n', " ")));
        self
    }

    /// A part by its debug text, in which every field of a value appears.
    #[must_use]
    pub fn debug(mut self, name: &str, value: &impl fmt::Debug) -> Self {
        struct Text(Sha256);
        impl fmt::Write for Text {
            fn write_str(&mut self, text: &str) -> fmt::Result {
                self.0.update(text);
                Ok(())
            }
        }
        let mut text = Text(Sha256::new());
        // Writing to a digest cannot fail.
        let _ = fmt::write(&mut text, format_args!("{value:?}"));
        self.part(name, text.0);
        self
    }

    /// A part of any bytes.
    #[must_use]
    pub fn bytes<T: AsRef<[u8]>>(mut self, name: &str, parts: impl IntoIterator<Item = T>) -> Self {
        let mut value = Sha256::new();
        parts.into_iter().for_each(|part| value.update(part));
        self.part(name, value);
        self
    }

    fn part(&mut self, name: &str, value: Sha256) {
        self.hasher.update((name.len() as u64).to_le_bytes());
        self.hasher.update(name);
        self.hasher.update(value.finalize());
    }

    pub fn finish(self) -> (Fingerprint, String) {
        (Fingerprint(self.hasher.finalize().into()), self.about)
    }
}

impl Fingerprint {
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The name of its folder.
    pub fn folder(&self) -> String {
        self.to_string()[..32].to_owned()
    }
}

/// In hexadecimal digits.
impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_values_and_their_borders_count() {
        let of = |parts: &[(&str, &str)]| {
            let parts = parts.iter().fold(FingerprintParts::default(), |all, (n, v)| all.text(n, v));
            parts.finish().0
        };
        let all =
            [of(&[]), of(&[("a", "b")]), of(&[("ab", "")]), of(&[("a", "")]), of(&[("a", "b"), ("c", "")])];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b));
        }
        let (_, about) = FingerprintParts::default().text("model", "x\ny").bytes("raw", [[1, 2]]).finish();
        assert_eq!(about, "model: x y\n");
    }
}
