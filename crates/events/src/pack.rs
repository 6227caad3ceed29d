//! The bytes of a batch: MessagePack `[time, [event, …], rank]`.
//!
//! An event is a map with its kind under `type` (vLLM from 0.24, SGLang from September 2026), or an
//! array that begins with its kind (before). DO NOT CHANGE: other projects read these bytes. A test
//! has them.

use oscar_engine::CacheEvent;
use serde::{Serialize, Serializer};

/// How an event is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// As a map with named fields.
    #[default]
    Map,
    /// As an array; for older readers.
    Array,
}

/// The tier that routers weigh highest. They know no other name for the memory that an engine
/// computes from, so a CPU says the same.
const MEDIUM: &str = "GPU";

/// One event on the wire. Stored pages that follow each other are one event.
#[derive(Serialize)]
#[serde(tag = "type")]
enum Wire {
    BlockStored {
        block_hashes: Vec<i64>,
        parent_block_hash: Option<i64>,
        token_ids: Vec<u32>,
        block_size: usize,
        lora_id: Option<i64>,
        medium: &'static str,
        lora_name: Option<&'static str>,
    },
    BlockRemoved {
        block_hashes: Vec<i64>,
        medium: &'static str,
    },
    AllBlocksCleared {},
}

/// The same as an array.
struct Positional<'a>(&'a Wire);

impl Serialize for Positional<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Wire::BlockStored {
                block_hashes,
                parent_block_hash,
                token_ids,
                block_size,
                lora_id,
                medium,
                lora_name,
            } => (
                "BlockStored",
                block_hashes,
                parent_block_hash,
                token_ids,
                block_size,
                lora_id,
                medium,
                lora_name,
            )
                .serialize(serializer),
            Wire::BlockRemoved { block_hashes, medium } => {
                ("BlockRemoved", block_hashes, medium).serialize(serializer)
            }
            Wire::AllBlocksCleared {} => ("AllBlocksCleared",).serialize(serializer),
        }
    }
}

/// Joins neighbours: stored pages of one chain, and removed pages.
fn joined<'a>(events: impl IntoIterator<Item = &'a CacheEvent>) -> Vec<Wire> {
    let mut wire: Vec<Wire> = Vec::new();
    for event in events {
        match (event, wire.last_mut()) {
            (
                CacheEvent::Stored { parent: Some(parent), hash, tokens },
                Some(Wire::BlockStored { block_hashes, token_ids, .. }),
            ) if block_hashes.last() == Some(&parent.event_id()) => {
                block_hashes.push(hash.event_id());
                token_ids.extend_from_slice(tokens);
            }
            (CacheEvent::Stored { parent, hash, tokens }, _) => wire.push(Wire::BlockStored {
                block_hashes: vec![hash.event_id()],
                parent_block_hash: parent.map(|parent| parent.event_id()),
                token_ids: tokens.to_vec(),
                block_size: tokens.len(),
                lora_id: None,
                medium: MEDIUM,
                lora_name: None,
            }),
            (CacheEvent::Removed { hash }, Some(Wire::BlockRemoved { block_hashes, .. })) => {
                block_hashes.push(hash.event_id());
            }
            (CacheEvent::Removed { hash }, _) => {
                wire.push(Wire::BlockRemoved { block_hashes: vec![hash.event_id()], medium: MEDIUM });
            }
            (CacheEvent::Cleared, _) => wire.push(Wire::AllBlocksCleared {}),
        }
    }
    wire
}

/// The bytes of a batch. `time` is in seconds since 1970.
pub fn pack<'a>(
    encoding: Encoding,
    time: f64,
    events: impl IntoIterator<Item = &'a CacheEvent>,
) -> Result<Vec<u8>, rmp_serde::encode::Error> {
    const RANK: i32 = 0;
    let wire = joined(events);
    let mut bytes = Vec::new();
    let mut serializer = rmp_serde::Serializer::new(&mut bytes).with_struct_map();
    match encoding {
        Encoding::Map => (time, &wire, RANK).serialize(&mut serializer)?,
        Encoding::Array => {
            let wire: Vec<_> = wire.iter().map(Positional).collect();
            (time, &wire, RANK).serialize(&mut serializer)?;
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_engine::PageHash;
    use std::sync::Arc;

    /// Two pages of a chain, a page of another, both ends removed, all cleared. Pages of two tokens
    /// keep the bytes readable.
    fn events() -> Vec<CacheEvent> {
        let pages: [Arc<[u32]>; 3] = [[1, 2].into(), [3, 70_000].into(), [300, 5].into()];
        let first = PageHash::of(None, &pages[0]);
        let second = PageHash::of(Some(&first), &pages[1]);
        let other = PageHash::of(None, &pages[2]);
        let stored =
            |parent, hash, page: &Arc<[u32]>| CacheEvent::Stored { parent, hash, tokens: page.clone() };
        vec![
            stored(None, first, &pages[0]),
            stored(Some(first), second, &pages[1]),
            stored(None, other, &pages[2]),
            CacheEvent::Removed { hash: second },
            CacheEvent::Removed { hash: other },
            CacheEvent::Cleared,
        ]
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Written with Python's msgpack after vLLM's and SGLang's definitions.
    #[test]
    fn bytes_are_those_that_others_read() {
        assert_eq!(
            hex(&pack(Encoding::Map, 1.5, &events()).unwrap()),
            "93cb3ff80000000000009488a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf\
             34fb5c825de7ca4acf15a3730b45d56506b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69\
             647394010203ce00011170aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a9\
             6c6f72615f6e616d65c088a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf7c\
             48fa8b33cca988b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647392cd012c05aa626c\
             6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c083a47479\
             7065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657392cf15a3730b45d56506cf7c48fa8b33\
             cca988a66d656469756da347505581a474797065b0416c6c426c6f636b73436c656172656400"
        );
        assert_eq!(
            hex(&pack(Encoding::Array, 1.5, &events()).unwrap()),
            "93cb3ff80000000000009498ab426c6f636b53746f72656492cf34fb5c825de7ca4acf15a3730b45d56506c0\
             94010203ce0001117002c0a3475055c098ab426c6f636b53746f72656491cf7c48fa8b33cca988c092cd012c\
             0502c0a3475055c093ac426c6f636b52656d6f76656492cf15a3730b45d56506cf7c48fa8b33cca988a34750\
             5591b0416c6c426c6f636b73436c656172656400"
        );
        assert_eq!(hex(&pack(Encoding::Map, 0.0, []).unwrap()), "93cb00000000000000009000");
    }
}
