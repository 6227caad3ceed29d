//! Files written by PyTorch (`fixtures/make_pt.py`) read back as the numbers they were made from.

use oscar_calibrate::zoo::{TorchFile, Value, ZooError, ZooFile};

use super::{LEGACY, NAN, STRIDED, V1, V2, V3, householder, read, refusal};

const D: usize = 8;

fn both_heads(layer: usize) -> Vec<f32> {
    [householder(layer, 0, D), householder(layer, 1, D)].concat()
}

#[test]
fn format_1_has_one_rotation_a_layer() {
    let file = read(V1).expect("a rotation file");
    assert_eq!((file.format_version, file.objective.as_str()), (1, "qqt_r_h_pbr"));
    assert_eq!(file.source_grouping, "layer");
    assert!(file.metadata.is_empty());
    assert_eq!(file.layers.keys().copied().collect::<Vec<_>>(), [0, 1]);
    for (&id, layer) in &file.layers {
        let id = id as usize;
        assert_eq!((layer.head_dim, layer.heads), (D, None));
        assert_eq!(layer.rotation, householder(id, 0, D));
        let expected: Vec<f32> = (0..D).map(|i| i as f32 + 0.25 * id as f32).collect();
        assert_eq!(layer.eigenvalues.as_ref(), Some(&expected));
        assert_eq!(layer.rotation_of_head(5), Some(layer.rotation.as_slice()), "shared by every head");
    }
    let (_, error) = file.orthogonality_error().expect("layers");
    assert!(error < 2e-7, "{error}");
}

#[test]
fn format_2_has_one_rotation_a_head() {
    let file = read(V2).expect("a rotation file");
    assert_eq!((file.format_version, file.source_grouping.as_str()), (2, "per_kv_head"));
    assert_eq!(file.layers.keys().copied().collect::<Vec<_>>(), [3, 7]);
    for (&id, layer) in &file.layers {
        assert_eq!((layer.heads, layer.eigenvalues.as_ref()), (Some(2), None));
        assert_eq!(layer.rotation, both_heads(id as usize));
        assert_eq!(layer.rotation_of_head(1), Some(householder(id as usize, 1, D).as_slice()));
        assert_eq!(layer.rotation_of_head(2), None);
    }
}

#[test]
fn format_3_has_companions_text_keys_and_metadata() {
    let file = read(V3).expect("a rotation file");
    assert_eq!((file.format_version, file.source_grouping.as_str()), (3, "head"));
    assert_eq!(file.metadata["transform"], "centered");
    let calibration = r#"{"tokens": 2048, "data": ["a", "b"], "damping": 0.5, "exact": true}"#;
    assert_eq!(file.metadata["calibration"], calibration);
    for (&id, layer) in &file.layers {
        let rotations = both_heads(id as usize);
        assert_eq!(layer.rotation, rotations);
        assert_eq!(layer.q_rotation.as_ref(), Some(&rotations));
        assert_eq!(layer.o_rotation.as_ref(), Some(&rotations), "float64 that is exactly float32");
        let mean = |head: usize| (0..D).map(move |i| (i as f32 - id as f32 + head as f32) / 8.0);
        assert_eq!(layer.k_mean.as_ref(), Some(&mean(0).chain(mean(1)).collect()));
        assert_eq!(layer.eigenvalues, None);
    }
}

#[test]
fn views_and_dtypes_become_contiguous_f32() {
    let file = read(STRIDED).expect("a rotation file");
    let matrix = |f: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
        (0..4).flat_map(|i| (0..4).map(move |j| (i, j))).map(|(i, j)| f(i, j)).collect()
    };
    let plain = matrix(&|i, j| i as f32 + j as f32 / 16.0);
    assert_eq!(file.layers[&0].rotation, matrix(&|i, j| j as f32 + i as f32 / 16.0), "transposed");
    let slice = matrix(&|i, j| (i + 2) as f32 + (2 * j + 1) as f32 / 16.0);
    assert_eq!(file.layers[&1].rotation, slice, "offset and step");
    for (id, what) in [(2, "half"), (3, "bfloat16"), (4, "double"), (5, "Parameter")] {
        assert_eq!(file.layers[&id].rotation, plain, "{what}");
    }
    assert_eq!(file.layers[&6].rotation, matrix(&|_, j| j as f32 + 1.0), "expanded with stride 0");
}

#[test]
fn a_rotation_that_is_none_is_measured_not_hidden() {
    let file = read(STRIDED).expect("a rotation file");
    let (worst, error) = file.orthogonality_error().expect("layers");
    assert!(error > 10.0, "layer {worst}: {error}");
}

#[test]
fn nan_is_refused_with_its_place() {
    match read(NAN) {
        Err(ZooError::NotFinite { layer: 5, field: "rotation", index: 2, value }) => assert!(value.is_nan()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn legacy_files_are_refused_with_advice() {
    assert!(refusal(LEGACY).contains("save it again with torch.save"));
}

#[test]
fn a_file_is_read_from_disk_and_its_size_is_limited() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("k.pt");
    assert!(matches!(ZooFile::read(&path), Err(ZooError::Io { .. })));
    std::fs::write(&path, V1).expect("a file");
    assert_eq!(ZooFile::read(&path).expect("a rotation file"), read(V1).expect("a rotation file"));
    let limits = oscar_calibrate::zoo::Limits { file_bytes: 100, ..Default::default() };
    assert!(matches!(ZooFile::read_with(&path, &limits), Err(ZooError::TooLarge { .. })));
}

#[test]
fn storages_are_lent_as_slices() {
    let torch = TorchFile::from_bytes(V1.to_vec(), &Default::default()).expect("a torch file");
    let Some(Value::Dict(layers)) = torch.root().get("layers") else { panic!("layers") };
    let Some(Value::Tensor(view)) = layers[0].1.get("rotation") else { panic!("rotation") };
    assert_eq!(view.strides, [D, 1]);
    let first = householder(0, 0, D)[0].to_le_bytes();
    assert!(torch.storage(&view.storage).expect("a storage").starts_with(&first));
    assert_eq!(torch.storage("no such key"), None);
}
