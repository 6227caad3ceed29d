//! What we write, we read; and it is what torch would have written.

use std::collections::BTreeMap;
use std::io::Cursor;

use oscar_calibrate::zoo::{Value, ZooError, ZooFile, ZooLayer, write};
use proptest::prelude::*;
use zip::ZipArchive;

use super::{V1, V2, V3, entry, read};

#[test]
fn the_pickle_is_byte_for_byte_torchs() {
    for (torch, stem) in [(V1, "v1"), (V2, "v2")] {
        let ours = write::to_bytes(&read(torch).expect("a rotation file")).expect("bytes");
        let theirs = entry(torch, &format!("{stem}/data.pkl"));
        assert_eq!(entry(&ours, "archive/data.pkl"), theirs, "{stem}");
        for record in ["byteorder", "version", "data/0", "data/1"] {
            let theirs = entry(torch, &format!("{stem}/{record}"));
            assert_eq!(entry(&ours, &format!("archive/{record}")), theirs, "{stem} {record}");
        }
        assert_eq!(read(&ours).expect("ours"), read(torch).expect("theirs"));
    }
}

#[test]
fn every_record_begins_at_a_multiple_of_64() {
    let bytes = write::to_bytes(&read(V1).expect("a rotation file")).expect("bytes");
    let mut archive = ZipArchive::new(Cursor::new(bytes.as_slice())).expect("a zip");
    assert!(archive.len() >= 8);
    for index in 0..archive.len() {
        let record = archive.by_index(index).expect("a record");
        assert_eq!(record.data_start() % 64, 0, "{}", record.name());
    }
}

#[test]
fn writing_replaces_a_file_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("k_rotation.pt");
    std::fs::write(&path, b"old").expect("an old file");
    let file = read(V2).expect("a rotation file");
    write::write(&file, &path).expect("written");
    assert_eq!(ZooFile::read(&path).expect("read"), file);
    assert_eq!(std::fs::read_dir(folder.path()).expect("the folder").count(), 1);
    let nowhere = folder.path().join("missing/k.pt");
    assert!(matches!(write::write(&file, &nowhere), Err(ZooError::Io { .. })));
}

#[test]
fn what_a_format_cannot_hold_is_refused() {
    let refused = |file: &ZooFile| match write::to_bytes(file) {
        Err(ZooError::CannotWrite { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    let mut v1 = read(V1).expect("a rotation file");
    v1.format_version = 2;
    assert!(refused(&v1).contains("set format_version to 1"));
    v1.format_version = 1;
    v1.metadata.insert("layers".into(), "x".into());
    assert!(refused(&v1).contains("\"layers\""));
    let mut v2 = read(V2).expect("a rotation file");
    v2.format_version = 1;
    assert!(refused(&v2).contains("set format_version to 2"));
    let mut v3 = read(V3).expect("a rotation file");
    assert!(refused(&v3).contains("only formats 1 and 2"));
    v3.format_version = 2;
    assert!(refused(&v3).contains("need format 3"));
}

#[test]
fn an_invalid_file_is_not_written() {
    let mut file = read(V1).expect("a rotation file");
    file.layers.get_mut(&1).expect("layer 1").rotation[9] = f32::INFINITY;
    assert!(matches!(write::to_bytes(&file), Err(ZooError::NotFinite { layer: 1, index: 9, .. })));
    file.layers.get_mut(&1).expect("layer 1").rotation.pop();
    assert!(matches!(write::to_bytes(&file), Err(ZooError::Shape { layer: 1, .. })));
    file.layers.get_mut(&1).expect("layer 1").head_dim = usize::MAX;
    assert!(matches!(write::to_bytes(&file), Err(ZooError::Layer { layer: 1, .. })));
    file.layers.clear();
    assert!(matches!(write::to_bytes(&file), Err(ZooError::Structure(_))));
}

#[test]
fn what_could_not_be_read_back_is_not_written() {
    let mut file = read(V1).expect("a rotation file");
    file.metadata.insert("note".into(), "x".repeat(64 << 10));
    assert!(matches!(write::to_bytes(&file), Err(ZooError::TooLarge { .. })));
    file.metadata.insert("note".into(), "x".repeat((64 << 10) - 4));
    assert_eq!(read(&write::to_bytes(&file).expect("bytes")).expect("read"), file);
    let layer = file.layers[&0].clone();
    file.layers = (0..4097).map(|id| (id, layer.clone())).collect();
    assert!(matches!(write::to_bytes(&file), Err(ZooError::TooLarge { .. })));
    file.layers.remove(&0);
    assert_eq!(
        read(&write::to_bytes(&file).expect("bytes")).expect("read"),
        file,
        "4096 layers, five batches"
    );
}

#[test]
fn one_layer_and_large_layer_numbers_survive() {
    for id in [0, 255, 256, 65_535, 65_536, 0x7fff_ffff, 0x8000_0000, u32::MAX] {
        let mut file = read(V1).expect("a rotation file");
        let layer = file.layers.remove(&0).expect("layer 0");
        file.layers = BTreeMap::from([(id, layer)]);
        assert_eq!(read(&write::to_bytes(&file).expect("bytes")).expect("read"), file, "layer {id}");
    }
}

#[test]
fn a_repeated_key_is_looked_up_as_python_would() {
    let key = || Value::Str("a".into());
    let dict =
        Value::Dict(vec![(key(), Value::Int(1)), (Value::Int(7), Value::None), (key(), Value::Int(2))]);
    assert_eq!(dict.get("a"), Some(&Value::Int(2)));
    assert_eq!(Value::None.get("a"), None);
}

fn any_file() -> impl Strategy<Value = ZooFile> {
    let heads = prop_oneof![Just(None), (1usize..4).prop_map(Some)];
    let finite = any::<f32>().prop_filter("finite", |x| x.is_finite());
    (heads, 1usize..6, proptest::collection::vec(any::<u32>(), 1..5), "\\PC*", any::<bool>()).prop_flat_map(
        move |(heads, d, ids, objective, with_eigenvalues)| {
            let (vector, matrix) = (heads.unwrap_or(1) * d, heads.unwrap_or(1) * d * d);
            let numbers = proptest::collection::vec(finite.clone(), vector + matrix);
            numbers.prop_map(move |numbers| {
                let layer = ZooLayer {
                    head_dim: d,
                    heads,
                    rotation: numbers[vector..].to_vec(),
                    eigenvalues: with_eigenvalues.then(|| numbers[..vector].to_vec()),
                    q_rotation: None,
                    k_mean: None,
                    o_rotation: None,
                };
                ZooFile {
                    format_version: if heads.is_some() { 2 } else { 1 },
                    objective: objective.clone(),
                    source_grouping: "layer".into(),
                    metadata: BTreeMap::from([("note".to_owned(), objective.clone())]),
                    layers: ids.iter().map(|&id| (id, layer.clone())).collect(),
                }
            })
        },
    )
}

proptest! {
    #[test]
    fn read_undoes_write(file in any_file()) {
        let bytes = write::to_bytes(&file).expect("bytes");
        prop_assert_eq!(read(&bytes).expect("read"), file.clone());
        prop_assert_eq!(write::to_bytes(&file).expect("bytes"), bytes, "the same bytes every time");
    }
}
