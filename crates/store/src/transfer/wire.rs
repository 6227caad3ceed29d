//! What two machines say to each other over TCP. One connection may carry several questions.
//!
//! ```text
//!   question                                  answer
//!    0  magic        "OSCARKV\1"               0  magic        "OSCARKV\1"
//!    8  ticket       16 bytes                  8  verdict      u32
//!   24  fingerprint  32 bytes                 12  count        u32
//!   56  verb         u32                      16  FIND: for each page a byte: 1 full, 2 coded, 4 part,
//!   60  count        u32                                8 sliding, 16 state
//!   64  FIND: page hashes, 32 bytes each          GET: for each page its length as u64 (0: not there)
//!       GET: hash, block u32, kind u32 each           and its bytes, as in a file of a store
//!       RELEASE: nothing                      all numbers little-endian
//! ```

use super::desk::TicketId;
use crate::fingerprint::Fingerprint;
use crate::object::{PageName, kind_number};
use oscar_cache::{PageHash, PageKind, StoredKinds};
use std::io::{self, ErrorKind, Read};

/// DO NOT CHANGE what follows without another last byte.
const MAGIC: &[u8; 8] = b"OSCARKV\x01";

/// Most pages of one question: four million tokens.
pub const MOST_PAGES: usize = 1 << 16;

const HEAD_BYTES: usize = 64;

/// What is asked about a ticket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Which of these pages there are, in the order of a sequence.
    Find(Vec<PageHash>),
    /// The pages themselves.
    Get(Vec<PageName>),
    /// Nothing any more: the ticket may be forgotten.
    Release,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    pub ticket: TicketId,
    pub fingerprint: Fingerprint,
    pub ask: Ask,
}

/// How a question was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Answered,
    /// There is no such ticket: it has expired, or never was.
    NoTicket,
    /// The asking machine has another model, cache or device.
    OtherFingerprint,
}

impl Verdict {
    const ALL: [Self; 3] = [Self::Answered, Self::NoTicket, Self::OtherFingerprint];
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

fn read_array<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn read_u32(from: &mut impl Read) -> io::Result<u32> {
    Ok(u32::from_le_bytes(read_array(from)?))
}

impl Question {
    pub fn to_bytes(&self) -> Vec<u8> {
        let (verb, count) = match &self.ask {
            Ask::Find(hashes) => (0u32, hashes.len()),
            Ask::Get(names) => (1, names.len()),
            Ask::Release => (2, 0),
        };
        let mut bytes = Vec::with_capacity(HEAD_BYTES + 40 * count);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&self.ticket.0);
        bytes.extend_from_slice(self.fingerprint.bytes());
        bytes.extend_from_slice(&verb.to_le_bytes());
        bytes.extend_from_slice(&(count as u32).to_le_bytes());
        match &self.ask {
            Ask::Find(hashes) => hashes.iter().for_each(|hash| bytes.extend_from_slice(hash.bytes())),
            Ask::Get(names) => {
                for name in names {
                    bytes.extend_from_slice(name.hash.bytes());
                    bytes.extend_from_slice(&name.block.to_le_bytes());
                    bytes.extend_from_slice(&kind_number(name.kind).to_le_bytes());
                }
            }
            Ask::Release => {}
        }
        bytes
    }

    /// Reads a question; `None` if the other side has closed the connection between two of them.
    ///
    /// # Errors
    /// If the connection fails, or the bytes are no question.
    pub fn read(from: &mut impl Read) -> io::Result<Option<Self>> {
        let mut first = [0];
        if from.read(&mut first)? == 0 {
            return Ok(None);
        }
        let rest: [u8; 7] = read_array(from)?;
        if first[0] != MAGIC[0] || rest != MAGIC[1..] {
            return Err(invalid("this is no question about pages"));
        }
        let ticket = TicketId(read_array(from)?);
        let fingerprint = Fingerprint::from_bytes(read_array(from)?);
        let (verb, count) = (read_u32(from)?, read_u32(from)? as usize);
        if count > MOST_PAGES {
            return Err(invalid("too many pages in one question"));
        }
        let hash = |from: &mut _| Ok::<_, io::Error>(PageHash::from_bytes(read_array(from)?));
        // Grows with the bytes that have come, not with what was announced.
        let ask = match verb {
            0 => {
                let mut hashes = Vec::new();
                for _ in 0..count {
                    hashes.push(hash(from)?);
                }
                Ask::Find(hashes)
            }
            1 => {
                let mut names = Vec::new();
                for _ in 0..count {
                    let (hash, block, kind) = (hash(from)?, read_u32(from)?, read_u32(from)?);
                    let kind = PageKind::ALL.into_iter().find(|known| kind_number(*known) == kind);
                    names.push(PageName { hash, block, kind: kind.ok_or_else(|| invalid("unknown kind"))? });
                }
                Ask::Get(names)
            }
            2 if count == 0 => Ask::Release,
            _ => return Err(invalid("unknown verb")),
        };
        Ok(Some(Self { ticket, fingerprint, ask }))
    }
}

/// The beginning of an answer.
pub fn answer_head(verdict: Verdict, count: usize) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&(verdict as u32).to_le_bytes());
    bytes.extend_from_slice(&(count as u32).to_le_bytes());
    bytes
}

/// Reads the beginning of an answer. It may speak of at most `most` pages.
///
/// # Errors
/// If the connection fails, or the bytes are no answer.
pub fn read_head(from: &mut impl Read, most: usize) -> io::Result<(Verdict, usize)> {
    if read_array::<8>(from)? != *MAGIC {
        return Err(invalid("this is no answer about pages"));
    }
    let (verdict, count) = (read_u32(from)?, read_u32(from)? as usize);
    let verdict = Verdict::ALL.into_iter().find(|known| *known as u32 == verdict);
    let verdict = verdict.ok_or_else(|| invalid("unknown verdict"))?;
    if count > most {
        return Err(invalid("an answer about more pages than were asked for"));
    }
    Ok((verdict, count))
}

pub fn kinds_byte(kinds: StoredKinds) -> u8 {
    let bit = |kind: &PageKind| u8::from(kinds.has(*kind)) << kind_number(*kind);
    PageKind::ALL.iter().map(bit).sum()
}

/// Reads the stored kinds of `count` pages.
///
/// # Errors
/// If the connection fails.
pub fn read_kinds(from: &mut impl Read, count: usize) -> io::Result<Vec<StoredKinds>> {
    let mut kinds = Vec::new();
    for _ in 0..count {
        let [byte] = read_array(from)?;
        let mut held = StoredKinds::default();
        let is_set = |kind: &PageKind| byte >> kind_number(*kind) & 1 != 0;
        PageKind::ALL.into_iter().filter(is_set).for_each(|kind| held.insert(kind));
        kinds.push(held);
    }
    Ok(kinds)
}

/// Reads a page of at most `most` bytes; `None` if it is not there.
///
/// # Errors
/// If the connection fails, or the page is longer.
pub fn read_page(from: &mut impl Read, most: usize) -> io::Result<Option<Vec<u8>>> {
    let length = u64::from_le_bytes(read_array(from)?);
    if length == 0 {
        return Ok(None);
    }
    if length > most as u64 {
        return Err(invalid("a page that is longer than any of ours"));
    }
    let mut bytes = Vec::new();
    from.take(length).read_to_end(&mut bytes)?;
    match bytes.len() as u64 == length {
        true => Ok(Some(bytes)),
        false => Err(ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FingerprintParts;

    #[test]
    fn a_question_is_read_as_it_was_written() {
        let (fingerprint, _) = FingerprintParts::default().text("model", "test").finish();
        let (ticket, hash) = (TicketId([7; 16]), PageHash::from_bytes([9; 32]));
        let name = PageName { hash, block: 3, kind: PageKind::Part };
        for ask in [Ask::Find(vec![hash; 2]), Ask::Get(vec![name]), Ask::Find(Vec::new()), Ask::Release] {
            let question = Question { ticket, fingerprint, ask };
            let bytes = question.to_bytes();
            assert_eq!(Question::read(&mut &bytes[..]).unwrap(), Some(question));
            for cut in 1..bytes.len() {
                assert!(Question::read(&mut &bytes[..cut]).is_err(), "cut off after {cut}");
            }
        }
        assert_eq!(Question::read(&mut &[][..]).unwrap(), None);
    }

    /// Golden bytes: machines of different versions talk to each other.
    #[test]
    fn the_bytes_stay_as_they_are() {
        let question = Question {
            ticket: TicketId([1; 16]),
            fingerprint: Fingerprint::from_bytes([2; 32]),
            ask: Ask::Get(vec![PageName {
                hash: PageHash::from_bytes([3; 32]),
                block: 0x0405,
                kind: PageKind::Coded,
            }]),
        };
        let parts: [&[u8]; 8] = [
            b"OSCARKV\x01",
            &[1; 16],
            &[2; 32],
            &[1, 0, 0, 0],
            &[1, 0, 0, 0],
            &[3; 32],
            &[5, 4, 0, 0],
            &[1, 0, 0, 0],
        ];
        assert_eq!(question.to_bytes(), parts.concat());
        assert_eq!(
            answer_head(Verdict::NoTicket, 5),
            [b"OSCARKV\x01", &[1, 0, 0, 0, 5, 0, 0, 0][..]].concat()
        );
    }

    #[test]
    fn kinds_are_bits_of_a_byte() {
        for (place, kind) in PageKind::ALL.into_iter().enumerate() {
            let mut held = StoredKinds::default();
            held.insert(kind);
            assert_eq!(kinds_byte(held), 1 << place);
            assert_eq!(read_kinds(&mut &[1u8 << place][..], 1).unwrap(), [held]);
        }
        assert!(read_kinds(&mut &[32u8][..], 1).unwrap()[0].is_empty(), "a kind of a later version");
    }

    #[test]
    fn more_than_was_asked_for_is_refused() {
        let head = answer_head(Verdict::Answered, 3);
        assert_eq!(read_head(&mut &head[..], 3).unwrap(), (Verdict::Answered, 3));
        assert!(read_head(&mut &head[..], 2).is_err());
        let mut page = 5u64.to_le_bytes().to_vec();
        page.extend_from_slice(b"abcde");
        assert_eq!(read_page(&mut &page[..], 5).unwrap(), Some(b"abcde".to_vec()));
        assert!(read_page(&mut &page[..], 4).is_err());
        assert!(read_page(&mut &page[..10], 5).is_err());
        assert!(read_page(&mut &u64::MAX.to_le_bytes()[..], 1 << 30).is_err());
        let mut many = Question {
            ticket: TicketId([1; 16]),
            fingerprint: Fingerprint::from_bytes([2; 32]),
            ask: Ask::Find(Vec::new()),
        }
        .to_bytes();
        many[60..64].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(Question::read(&mut &many[..]).is_err());
    }
}
