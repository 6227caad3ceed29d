//! Damaged and malicious zip files: an error or a checked value, never a panic.

use oscar_calibrate::zoo::{Limits, ZooError, ZooFile};
use proptest::prelude::*;

use super::{STRIDED, V1, V2, V3, entry, read, refusal, zip_of};

#[test]
fn every_truncation_is_refused() {
    for file in [V1, V2, V3, STRIDED] {
        for length in 0..file.len() {
            assert!(read(&file[..length]).is_err(), "the first {length} bytes of {}", file.len());
        }
    }
}

#[test]
fn every_bit_flip_is_refused_or_harmless() {
    for file in [V1, STRIDED] {
        for at in 0..file.len() {
            for bit in 0..8 {
                let mut damaged = file.to_vec();
                damaged[at] ^= 1 << bit;
                if let Ok(value) = read(&damaged) {
                    value.validate().expect("what is read is valid");
                }
            }
        }
    }
}

#[test]
fn a_flipped_tensor_bit_is_caught_by_the_checksum() {
    let number = entry(V1, "v1/data/0");
    let at = V1.windows(number.len()).position(|bytes| bytes == number).expect("the storage in the file");
    let mut damaged = V1.to_vec();
    damaged[at + 5] ^= 1;
    let message = refusal(&damaged);
    assert!(message.contains("v1/data/0") && message.contains("download the file again"), "{message}");
}

#[test]
fn what_is_no_torch_zip_is_named() {
    assert!(refusal(b"").contains("empty"));
    assert!(refusal(b"{\"json\": 1}").contains("zip header"));
    assert!(refusal(b"\x80\x02}.").contains("legacy"));
    assert!(refusal(&zip_of(&[("a/b", b"x")])).contains("without <name>/data.pkl"));
    assert!(refusal(&zip_of(&[("a/data.pkl", b"."), ("b/data.pkl", b".")])).contains("more than one"));
    assert!(refusal(&zip_of(&[("a/data.pkl", b"N."), ("a/constants.pkl", b"")])).contains("TorchScript"));
    assert!(refusal(&zip_of(&[("a/data.pkl", b"N."), ("a/byteorder", b"big")])).contains("byte order"));
}

#[test]
fn names_that_leave_the_archive_are_refused() {
    for name in ["../data/0", "a/../../etc/passwd", "/etc/passwd", "a\\b", "c:/x", "a/./b"] {
        let message = refusal(&zip_of(&[("a/data.pkl", b"N."), (name, b"x")]));
        assert!(message.contains("leaves the archive"), "{name}: {message}");
    }
}

#[test]
fn of_two_entries_with_one_name_the_later_counts() {
    let mut zip = zip_of(&[("a/data.pk0", b"cos\nsystem\n."), ("a/data.pkl", b"N.")]);
    while let Some(at) = zip.windows(4).position(|bytes| bytes == b".pk0") {
        zip[at + 3] = b'l';
    }
    assert!(refusal(&zip).contains("the top value is None"));
}

/// A local header, a central header and an end record, with the fields under attack given.
fn raw_zip(method: u16, flags: u16, compressed: u32, size: u32, body: &[u8]) -> Vec<u8> {
    let name = b"a/data.pkl";
    let fields = |out: &mut Vec<u8>| {
        for half in [20, flags, method, 0, 33] {
            out.extend(u16::to_le_bytes(half));
        }
        for word in [0, compressed, size] {
            out.extend(u32::to_le_bytes(word));
        }
        out.extend((name.len() as u16).to_le_bytes());
        out.extend([0, 0]);
    };
    let mut zip = b"PK\x03\x04".to_vec();
    fields(&mut zip);
    zip.extend(name);
    zip.extend(body);
    let directory = zip.len() as u32;
    zip.extend(b"PK\x01\x02\x14\x00");
    fields(&mut zip);
    zip.extend([0; 14]);
    zip.extend(name);
    let directory_size = zip.len() as u32 - directory;
    zip.extend(b"PK\x05\x06\x00\x00\x00\x00\x01\x00\x01\x00");
    zip.extend(directory_size.to_le_bytes());
    zip.extend(directory.to_le_bytes());
    zip.extend([0, 0]);
    zip
}

#[test]
fn compressed_and_encrypted_entries_are_refused_unread() {
    let bomb = refusal(&raw_zip(8, 0, 4, 0xffff_fff0, b"\x03\x00\x00\x00"));
    assert!(bomb.contains("compressed"), "{bomb}");
    let unequal = refusal(&raw_zip(0, 0, 4, 0xffff_fff0, b"abcd"));
    assert!(unequal.contains("compressed"), "{unequal}");
    let secret = refusal(&raw_zip(0, 1, 4, 4, b"abcd"));
    assert!(secret.contains("encrypted"), "{secret}");
}

#[test]
fn an_entry_larger_than_the_file_is_refused() {
    let message = refusal(&raw_zip(0, 0, 0x7fff_fff0, 0x7fff_fff0, b"abcd"));
    assert!(message.contains("beyond the end of the file"), "{message}");
}

#[test]
fn every_limit_is_enforced() {
    let with = |change: fn(&mut Limits)| {
        let mut limits = Limits::default();
        change(&mut limits);
        ZooFile::from_bytes(V3.to_vec(), &limits)
    };
    assert!(with(|_| {}).is_ok());
    let too_large = |result| matches!(result, Err(ZooError::TooLarge { .. }));
    assert!(too_large(with(|limits| limits.file_bytes = 7000)));
    assert!(too_large(with(|limits| limits.entries = 3)));
    assert!(too_large(with(|limits| limits.pickle_bytes = 100)));
    assert!(too_large(with(|limits| limits.tensor_bytes = 2000)));
    let pickle = |result| matches!(result, Err(ZooError::Pickle { .. }));
    assert!(pickle(with(|limits| limits.operations = 50)));
    assert!(pickle(with(|limits| limits.values = 20)));
    assert!(pickle(with(|limits| limits.depth = 2)));
}

proptest! {
    #[test]
    fn random_bytes_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..600), zip in any::<bool>()) {
        if zip && bytes.len() >= 2 {
            bytes[..2].copy_from_slice(b"PK");
        }
        prop_assert!(read(&bytes).is_err());
    }

    #[test]
    fn random_damage_never_panics(
        which in 0usize..4,
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
    ) {
        let mut bytes = [V1, V2, V3, STRIDED][which].to_vec();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(value) = read(&bytes) {
            prop_assert!(value.validate().is_ok());
        }
    }
}
