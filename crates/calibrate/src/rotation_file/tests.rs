//! Round trips, and files that are cut, damaged or hostile.

use super::*;
use crate::bits::{HarmMap, WidthTable};
use crate::zoo::Limits;
use oscar_codec::Rotation;
use oscar_models::tiny::tiny_config;
use oscar_models::{Family, SlidingLayers};
use proptest::prelude::*;
use std::fs;
use std::io::Cursor;

/// Orthogonal, and different for every seed: a Hadamard matrix with some columns turned.
fn rotation(d: usize, seed: usize) -> Rotation {
    let mut matrix = Rotation::hadamard(d).unwrap().matrix().to_vec();
    for row in matrix.chunks_exact_mut(d) {
        for (j, v) in row.iter_mut().enumerate() {
            if (j * 7 + seed * 13) % 5 < 2 {
                *v = -*v;
            }
        }
    }
    Rotation::from_matrix(d, matrix).unwrap()
}

fn file(granularity: Granularity, centred: bool) -> RotationFile {
    let (layers, kv_heads, d) = (3, 2, 32);
    let heads = (0..layers * kv_heads)
        .map(|i| {
            let seed = if granularity == Granularity::Layer { i / kv_heads } else { i };
            HeadRotations {
                key: rotation(d, seed),
                value: rotation(d, seed + 100),
                key_mean: centred.then(|| (0..d).map(|c| (c + i) as f32 / 7.0).collect()),
            }
        })
        .collect();
    let stored = if granularity == Granularity::Layer { layers } else { layers * kv_heads };
    RotationFile {
        rotations: RotationSet::per_head(layers, kv_heads, d, heads).unwrap(),
        clips: Clips::uniform(layers * kv_heads, (2, 2)),
        key_eigenvalues: Some((0..stored * d).map(|i| i as f32).collect()),
        value_eigenvalues: Some((0..stored * d).map(|i| i as f32 * 2.0).collect()),
        bits: BitPlan::default(),
        metadata: Metadata {
            model_fingerprint: Some("ab".repeat(32)),
            granularity,
            statistic: "paper".into(),
            composition: "r_h_pbr".into(),
            centred,
            clip: "official".into(),
            clip_bits: (2, 2),
            tokens: 1234,
            sequences: 5,
            sequence_len: 512,
            text_digest: Some("cd".repeat(32)),
            tool: "oscar test".into(),
            note: "made \"here\"\n".into(),
        },
    }
}

#[test]
fn roundings_follow_the_spectrum_or_say_that_there_is_none() {
    let of_heads = file(Granularity::Head, true);
    assert!(of_heads.roundings(CodeRounding::Nearest).unwrap().iter().all(|r| r.is_nearest()));
    let [layers, kv_heads, d] = of_heads.shape();
    let shaped = |mut file: RotationFile, composition: &str| {
        file.metadata.composition = composition.into();
        file.roundings(CodeRounding::Shaped)
    };
    let heads = shaped(of_heads.clone(), "r_h").unwrap();
    assert_eq!(heads.len(), layers * kv_heads);
    assert!(heads.iter().all(|r| r.unbiased && r.feedback.as_ref().is_some_and(|f| f.dim() == d)));
    assert_ne!(heads[0].feedback, heads[1].feedback);
    // One rotation for a layer: its heads share the query metric.
    let shared = shaped(file(Granularity::Layer, true), "r_h").unwrap();
    assert_eq!(shared[0].feedback, shared[1].feedback);
    assert_ne!(shared[0].feedback, shared[kv_heads].feedback);
    let mut without = of_heads.clone();
    without.key_eigenvalues = None;
    for refused in [shaped(without, "r_h"), shaped(of_heads, "h")] {
        assert!(refused.unwrap_err().to_string().contains("--rounding nearest"));
    }
}

fn with_widths() -> RotationFile {
    let mut file = file(Granularity::Head, true);
    let table = |units: [u32; 12]| WidthTable::from_units(3, 2, &units);
    file.bits = BitPlan {
        layers: vec![0, 1, 2],
        tables: vec![
            ("2.25".parse().unwrap(), table([1, 2, 3, 4, 1, 1, 2, 2, 2, 2, 2, 2])),
            ("1.75".parse().unwrap(), table([1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1])),
        ],
        harm: Some(HarmMap {
            layers: 3,
            kv_heads: 2,
            harm: (0..12).map(|i| [i as f32, 0.5, 0.25, 0.0]).collect(),
            error: (0..12).map(|i| [i as f32 / 8.0; 4]).collect(),
            absent: (0..6).map(|i| (i % 2 == 1).then_some(i as f32)).collect(),
        }),
        rounding: CodeRounding::Shaped,
    };
    file
}

#[test]
fn widths_and_harms_survive() {
    let file = with_widths();
    let written = bytes(&file);
    let back = RotationFile::read(&mut Cursor::new(&written), written.len() as u64).unwrap();
    assert_eq!(back.bits, file.bits);
    assert_eq!(back.bits.table("1.75".parse().unwrap()).unwrap().units()[1..4], [1, 0, 0]);
    assert_eq!(back.bits.means(), "1.75, 2.25");
}

/// As [`with_widths`], but layer 1 slides: it has a rotation and no widths.
fn with_sliding_layer() -> RotationFile {
    let mut file = with_widths();
    let BitPlan { layers, tables, harm, .. } = &mut file.bits;
    *layers = vec![0, 2];
    for (_, table) in tables {
        table.layers = 2;
        table.widths.drain(2..4);
    }
    let harm = harm.as_mut().unwrap();
    harm.layers = 2;
    harm.harm.drain(4..8);
    harm.error.drain(4..8);
    harm.absent.drain(2..4);
    file
}

#[test]
fn widths_of_some_layers_survive_and_belong_to_their_model() {
    let file = with_sliding_layer();
    let written = bytes(&file);
    let read = |bytes: &[u8]| RotationFile::read(&mut Cursor::new(bytes), bytes.len() as u64);
    assert_eq!(read(&written).unwrap().bits, file.bits);
    // Files of models without sliding layers have no such field.
    assert!(!String::from_utf8_lossy(&bytes(&with_widths())).contains("width_layers"));

    let sliding = |layers| Some(SlidingLayers { window: 64, layers, rope: None });
    let base = tiny_config(Family::Llama);
    let mut config = DecoderConfig { layers: 3, kv_heads: 2, head_dim: file.shape()[2], ..base };
    config.sliding = sliding(vec![1]);
    let print = "ab".repeat(32);
    file.check_model(&print, &config).unwrap();
    for other in [None, sliding(vec![0]), sliding(vec![0, 1])] {
        config.sliding = other;
        let error = file.check_model(&print, &config).unwrap_err().to_string();
        assert!(error.contains("widths for layers [0, 2]"), "{error}");
        assert!(error.contains(&format!("quantizes layers {:?}", config.full_attention_layers())), "{error}");
    }
    let error = with_widths().check_model(&print, &config).unwrap_err().to_string();
    assert!(
        error.contains("widths for layers [0, 1, 2]") && error.contains("quantizes layers [2]"),
        "{error}"
    );

    let altered = |from: &str, to: &str| {
        let at = written.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
        let mut bytes = written.clone();
        bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
        read(&bytes).unwrap_err().to_string()
    };
    let listed = r#""width_layers":"0,2""#;
    for (to, says) in [("0,9", "[0, 9] of 3 layers"), ("2,0", "[2, 0]"), ("0;2", "'0;2'"), ("2,2", "[2, 2]")]
    {
        let error = altered(listed, &listed.replace("0,2", to));
        assert!(error.contains("width_layers") && error.contains(says), "{error}");
    }
    let error = altered("width_layers", "width_nobody");
    assert!(error.contains("widths") && error.contains("[2, 3, 2, 2]"), "the list is missing: {error}");
}

#[test]
fn impossible_widths_are_refused() {
    let refuse = |change: fn(&mut BitPlan)| {
        let mut file = with_widths();
        change(&mut file.bits);
        file.write(&mut Vec::new()).unwrap_err().to_string()
    };
    assert!(refuse(|b| b.tables[0].1.widths[0].0 = 6).contains("widths"));
    assert!(refuse(|b| b.tables[0].1.widths[0].1 = 0).contains("widths"), "history of one side alone");
    assert!(refuse(|b| b.harm.as_mut().unwrap().absent[1] = Some(f32::NAN)).contains("harm_absent"));
    assert!(refuse(|b| b.tables[0].1.widths.truncate(2)).contains("widths"));
    assert!(refuse(|b| b.tables[1].0 = b.tables[0].0).contains("twice"));
    assert!(refuse(|b| b.harm.as_mut().unwrap().harm[3][1] = -1.0).contains("harm"));
    assert!(refuse(|b| b.harm.as_mut().unwrap().error[3][1] = f32::NAN).contains("harm_error"));
    assert!(refuse(|b| b.harm.as_mut().unwrap().harm.truncate(3)).contains("harm"));
    // A mean without its table, and one that no widths can have.
    let text = bytes(&with_widths());
    let replaced = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let at = text.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
        let mut changed = text.clone();
        changed[at..at + to.len()].copy_from_slice(to.as_bytes());
        RotationFile::read(&mut Cursor::new(&changed), changed.len() as u64).unwrap_err().to_string()
    };
    assert!(replaced("225,175", "225,975").contains("width_means"));
    assert!(replaced("225,175", "225    ").contains("width_means"));
}

fn bytes(file: &RotationFile) -> Vec<u8> {
    let mut out = Vec::new();
    file.write(&mut out).unwrap();
    out
}

fn read(bytes: &[u8]) -> Result<RotationFile, RotationFileError> {
    RotationFile::read(&mut Cursor::new(bytes), bytes.len() as u64)
}

fn refusal(bytes: &[u8]) -> String {
    read(bytes).expect_err("a refusal").to_string()
}

#[test]
fn files_round_trip_to_the_last_bit() {
    for granularity in [Granularity::Head, Granularity::Layer] {
        for centred in [true, false] {
            let mut original = file(granularity, centred);
            original.clips.key[3] = 0.87;
            original.clips.value[1] = 0.0;
            let written = bytes(&original);
            assert_eq!(read(&written).unwrap(), original);
            assert_eq!(bytes(&original), written, "the same contents give the same bytes");
            // Any safetensors reader can open it.
            let tensors = safetensors::SafeTensors::deserialize(&written).unwrap();
            let heads = if granularity == Granularity::Layer { 1 } else { 2 };
            assert_eq!(tensors.tensor("key_rotation").unwrap().shape(), [3, heads, 32, 32]);
            assert_eq!(tensors.tensor("key_mean").is_ok(), centred);
        }
    }
}

#[test]
fn ratios_keep_their_decimal_value() {
    let mut original = file(Granularity::Head, false);
    original.clips.key = vec![0.8, 0.9, 0.92, 0.96, 0.99, 0.0];
    let again = read(&bytes(&original)).unwrap();
    assert_eq!(again.clips, original.clips);
    for (a, b) in original.clips.key.iter().zip(&again.clips.key) {
        assert_eq!(oscar_codec::clip::order_index(*a, 80), oscar_codec::clip::order_index(*b, 80));
    }
}

#[test]
fn saving_leaves_one_whole_file_or_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rotations.safetensors");
    let original = file(Granularity::Head, true);
    original.save(&path).unwrap();
    assert_eq!(RotationFile::load(&path).unwrap(), original);
    let mut broken = original.clone();
    broken.clips.key.pop();
    assert!(broken.save(&path).is_err());
    assert_eq!(RotationFile::load(&path).unwrap(), original, "the old file is still there");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
    let error = original.save(&folder.path().join("no/such/folder")).unwrap_err().to_string();
    assert!(error.contains("no/such/folder"), "{error}");
    let error = RotationFile::load(&folder.path().join("absent")).unwrap_err().to_string();
    assert!(error.contains("absent"), "{error}");
}

#[test]
fn other_models_are_refused() {
    let file = file(Granularity::Head, true);
    let mut config = oscar_models::tiny::tiny_config(oscar_models::Family::Qwen3);
    (config.layers, config.kv_heads, config.head_dim) = (3, 2, 32);
    file.check_model(&"ab".repeat(32), &config).unwrap();
    let error = file.check_model(&"00".repeat(32), &config).unwrap_err().to_string();
    assert!(error.contains("abababababab") && error.contains("calibrate"), "{error}");
    config.layers = 4;
    let error = file.check_model(&"ab".repeat(32), &config).unwrap_err().to_string();
    assert!(error.contains("3 layers") && error.contains("the model has 4"), "{error}");
}

#[test]
fn truncated_files_are_refused_wherever_they_end() {
    let whole = bytes(&file(Granularity::Head, true));
    for length in (0..whole.len()).step_by(97).chain([7, 8, whole.len() - 1]) {
        assert!(read(&whole[..length]).is_err(), "{length} bytes");
    }
    let message = refusal(&whole[..whole.len() - 4]);
    assert!(message.contains("damaged") && message.contains(&whole.len().to_string()), "{message}");
    let mut longer = whole.clone();
    longer.push(0);
    assert!(refusal(&longer).contains("damaged"));
}

/// The file with its header text changed (to the same length) by `edit`.
fn with_header(edit: impl Fn(&str) -> String) -> Vec<u8> {
    let whole = bytes(&file(Granularity::Layer, false));
    let size = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let header = edit(std::str::from_utf8(&whole[8..8 + size]).unwrap());
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &whole[8 + size..]].concat()
}

#[test]
fn lies_in_the_header_are_found() {
    for (from, to, expected) in [
        ("oscar-rotations", "other-rotations", "something else"),
        ("\"format_version\":\"1\"", "\"format_version\":\"9\"", "version 9"),
        ("\"kv_heads\":\"2\"", "\"kv_heads\":\"3\"", "key_clip"),
        ("\"kv_heads\":\"2\"", "\"kv_heads\":\"0\"", "kv_heads"),
        ("\"layers\":\"3\"", "\"layers\":\"4\"", "key_rotation"),
        ("\"layers\":\"3\"", "\"layers\":\"99999999999\"", "layers"),
        ("\"layers\":\"3\"", "\"layers\":\"4000\"", "key_rotation"),
        ("\"head_dim\":\"32\"", "\"head_dim\":\"1000000\"", "head_dim"),
        ("\"head_dim\":\"32\"", "\"head_dim\":\"16\"", "key_rotation"),
        ("\"centred\":\"false\"", "\"centred\":\"true\"", "key_mean"),
        ("\"granularity\":\"layer\"", "\"granularity\":\"head\"", "key_rotation"),
        ("\"granularity\":\"layer\"", "\"granularity\":\"none\"", "granularity"),
        ("\"clip_bits\":\"2,2\"", "\"clip_bits\":\"two\"", "clip_bits"),
        ("\"value_clip\":{", "\"other_clip\":{", "unknown tensor"),
        ("\"F32\"", "\"I32\"", "F32"),
        ("__metadata__", "__somethin__", "unreadable"),
    ] {
        let message = refusal(&with_header(|header| {
            assert!(header.contains(from), "{from} in {header}");
            header.replace(from, to)
        }));
        assert!(message.contains(expected), "{from} → {to}: {message}");
    }
    let many = with_header(|h| {
        h.replace("\"kv_heads\":\"2\"", "\"kv_heads\":\"1024\"").replace("[3,2]", "[3,1024]")
    });
    assert!(read(&many).is_err());
    let text = "x".repeat(5000);
    assert!(refusal(&with_header(|h| h.replace("oscar test", &text))).contains("tool"));
}

#[test]
fn a_declared_giant_allocates_nothing() {
    let mut giant = (200u64 << 10).to_le_bytes().to_vec();
    giant.extend([b' '; 100]);
    assert!(refusal(&giant).contains("states a header"));
    let huge = RotationFile::read(&mut Cursor::new(&giant), 1 << 40).unwrap_err().to_string();
    assert!(huge.contains("refused"), "{huge}");
    let mut header = u64::MAX.to_le_bytes().to_vec();
    header.extend([0; 64]);
    assert!(read(&header).is_err());
}

/// A file as earlier versions wrote it: without a checksum.
fn unsigned(file: &[u8]) -> Vec<u8> {
    let at = file.windows(CHECKSUM.len()).position(|w| w == CHECKSUM.as_bytes()).unwrap();
    let mut file = file.to_vec();
    file[at] = b'x';
    file
}

/// Values that pass every other check: a mean, an eigenvalue, a width.
#[test]
fn a_changed_value_is_noticed_by_the_checksum() {
    let whole = bytes(&with_widths());
    assert_eq!(read(&unsigned(&whole)).unwrap(), with_widths());
    for from_end in [4, 400, 1000] {
        let mut changed = whole.clone();
        let at = whole.len() - from_end;
        changed[at] ^= 1;
        assert!(refusal(&changed).contains("damaged"), "{from_end} bytes before the end");
    }
}

#[test]
fn bad_numbers_are_refused() {
    let original = file(Granularity::Head, true);
    let whole = unsigned(&bytes(&original));
    let data = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let change = |index: usize, value: f32| {
        let mut bytes = whole.clone();
        bytes[data + 4 * index..][..4].copy_from_slice(&value.to_le_bytes());
        bytes
    };
    assert!(refusal(&change(5, f32::NAN)).contains("key_rotation holds NaN at 5"));
    let message = refusal(&change(32 * 32 + 3, 9.0));
    assert!(message.contains("layer 0, KV head 1") && message.contains("not orthogonal"), "{message}");
    let clips = 2 * 6 * 32 * 32;
    assert!(refusal(&change(clips + 2, 1.5)).contains("key_clip holds 1.5"));
    assert!(refusal(&change(clips + 6, -0.25)).contains("value_clip"));
    assert!(refusal(&change(clips + 12, f32::INFINITY)).contains("key_eigenvalues"));

    let mut uneven = original.clone();
    uneven.metadata.granularity = Granularity::Layer;
    uneven.key_eigenvalues = None;
    uneven.value_eigenvalues = None;
    assert!(uneven.check().unwrap_err().to_string().contains("heads of layer 0 differ"));
    let mut half = original;
    half.metadata.centred = false;
    assert!(half.check().unwrap_err().to_string().contains("centred"));
}

#[test]
fn zoo_files_come_back_and_losses_are_refused() {
    for (granularity, version) in [(Granularity::Layer, 1), (Granularity::Head, 2)] {
        let original = file(granularity, false);
        let (key, value) = original.to_zoo(false).unwrap();
        assert_eq!((key.format_version, value.format_version), (version, version));
        let reread = |side| {
            let bytes = crate::zoo::write::to_bytes(side).unwrap();
            ZooFileBytes(bytes).read()
        };
        let again = RotationFile::from_zoo(&reread(&key), &reread(&value), 2).unwrap();
        assert_eq!(again.rotations, original.rotations);
        assert_eq!(again.clips, original.clips);
        assert_eq!(again.key_eigenvalues, original.key_eigenvalues);
        assert_eq!(again.metadata.granularity, granularity);
        assert_eq!(again.metadata.model_fingerprint, None);
        assert_eq!(
            again.to_zoo(false).unwrap(),
            (key.clone(), value.clone()),
            "an import exports as it came"
        );
        assert_eq!(read(&bytes(&again)).unwrap(), again);

        let centred = file(granularity, true);
        assert!(centred.to_zoo(false).unwrap_err().to_string().contains("key means"));
        assert_eq!(centred.to_zoo(true).unwrap().0.layers, key.layers);
        let mut clipped = original.clone();
        clipped.clips.value[0] = 0.8;
        assert!(clipped.to_zoo(false).unwrap_err().to_string().contains("clip ratios"));
        assert!(clipped.to_zoo(true).is_ok());
    }
    let (key, _) = file(Granularity::Layer, false).to_zoo(false).unwrap();
    assert_eq!((key.objective.as_str(), key.source_grouping.as_str()), ("qqt_r_h_pbr", "layer"));
}

struct ZooFileBytes(Vec<u8>);

impl ZooFileBytes {
    fn read(self) -> crate::zoo::ZooFile {
        crate::zoo::ZooFile::from_bytes(self.0, &Limits::default()).unwrap()
    }
}

#[test]
fn pairs_that_do_not_go_together_are_refused() {
    let (key, value) = file(Granularity::Head, false).to_zoo(false).unwrap();
    let error = |key: &crate::zoo::ZooFile, value: &crate::zoo::ZooFile, heads| {
        RotationFile::from_zoo(key, value, heads).unwrap_err().to_string()
    };
    assert!(error(&key, &value, 4).contains("the model has 4"));
    let mut short = value.clone();
    short.layers.remove(&2);
    assert!(error(&key, &short, 2).contains("K has 3 layers"));
    let (mut gap_key, mut gap_value) = (key.clone(), value.clone());
    gap_key.layers.remove(&1);
    gap_value.layers.remove(&1);
    assert!(error(&gap_key, &gap_value, 2).contains("hybrid"));
    let mut oblique = key.clone();
    let layer = oblique.layers.get_mut(&1).unwrap();
    layer.q_rotation = Some(layer.rotation.iter().map(|v| v * 2.0).collect());
    assert!(error(&oblique, &value, 2).contains("oblique"));
    let mut stretched = key.clone();
    stretched.layers.get_mut(&0).unwrap().rotation.iter_mut().for_each(|v| *v *= 2.0);
    assert!(error(&stretched, &value, 2).contains("not orthogonal"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever happens to the bytes, reading ends in a value or an error.
    #[test]
    fn damaged_bytes_never_panic(changes in prop::collection::vec((0usize..3000, any::<u8>()), 1..6)) {
        let mut whole = bytes(&file(Granularity::Layer, true));
        for (at, value) in changes {
            whole[at] = value;
        }
        let _ = read(&whole);
    }
}
