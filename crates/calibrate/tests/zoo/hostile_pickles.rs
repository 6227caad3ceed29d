//! Pickles that ask for code, for memory or for bytes that are not there.

use oscar_calibrate::zoo::pickle::unpickle;
use oscar_calibrate::zoo::{Limits, PickleError, Value, ZooError};
use proptest::prelude::*;

use super::{V1, V3, entry, read, refusal, zip_of};

/// Runs a pickle beside one storage, "0", of 16 bytes.
fn run(pickle: &[u8]) -> Result<Value, PickleError> {
    let storages = |key: &str| (key == "0").then_some(16);
    match unpickle(pickle, &storages, &Limits::default()) {
        Ok(value) => Ok(value),
        Err(ZooError::Pickle { fault, .. }) => Err(fault),
        Err(other) => panic!("{other}"),
    }
}

fn int(n: i64) -> Vec<u8> {
    [&[0x8a, 8][..], &n.to_le_bytes()].concat()
}

fn tuple(items: &[i64]) -> Vec<u8> {
    [b"(".to_vec(), items.iter().flat_map(|&n| int(n)).collect(), b"t".to_vec()].concat()
}

/// A tensor over storage `key` with these claims.
fn tensor(class: &str, key: &str, numel: i64, offset: i64, shape: &[i64], strides: &[i64]) -> Vec<u8> {
    let mut out = b"ctorch._utils\n_rebuild_tensor_v2\n((\x8c\x07storage".to_vec();
    out.extend(format!("ctorch\n{class}\n").as_bytes());
    out.extend([0x8c, key.len() as u8]);
    out.extend(key.as_bytes());
    out.extend(b"\x8c\x03cpu");
    out.extend(int(numel));
    out.extend(b"tQ");
    out.extend(int(offset));
    out.extend(tuple(shape));
    out.extend(tuple(strides));
    out.extend(b"\x89ccollections\nOrderedDict\n)RtR");
    out
}

fn tensor_fault(numel: i64, offset: i64, shape: &[i64], strides: &[i64]) -> String {
    let pickle = [tensor("FloatStorage", "0", numel, offset, shape, strides), b".".to_vec()].concat();
    run(&pickle).expect_err("a refusal").to_string()
}

#[test]
fn code_is_refused_by_name() {
    let attack = b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.";
    assert_eq!(run(attack), Err(PickleError::Forbidden("os.system".into())));
    let stacked = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.";
    assert_eq!(run(stacked), Err(PickleError::Forbidden("posix.system".into())));
    for name in
        ["builtins\neval", "torch\nload", "torch._utils\n_rebuild_tensor", "collections\nFloatStorage"]
    {
        let fault = run(format!("c{name}\n.").as_bytes()).expect_err("a refusal");
        assert_eq!(fault, PickleError::Forbidden(name.replace('\n', ".")));
    }
    let message = refusal(&zip_of(&[("a/data.pkl", attack)]));
    assert!(message.contains("os.system") && message.contains("nothing is run"), "{message}");
}

#[test]
fn opcodes_that_build_objects_are_refused() {
    for opcode in *b"obiPIFLSUTBC" {
        assert_eq!(run(&[opcode, b'.']), Err(PickleError::Opcode(opcode)), "{}", opcode as char);
    }
    for opcode in [0x81, 0x82, 0x83, 0x84, 0x8e, 0x8f, 0x90, 0x91, 0x92, 0x96, 0x97, 0x98] {
        assert_eq!(run(&[opcode]), Err(PickleError::Opcode(opcode)), "{opcode:#x}");
    }
}

#[test]
fn reduce_calls_only_what_is_listed_with_the_right_arguments() {
    let kind = |expected, found| Err(PickleError::Type { expected, found });
    assert_eq!(run(b"X\x01\x00\x00\x00f)R."), kind("an allowed function", "a string"));
    assert_eq!(run(b"ccollections\nOrderedDict\n]R."), kind("a tuple", "a list"));
    assert!(matches!(run(b"ccollections\nOrderedDict\n]\x85R."), Err(PickleError::Tensor(_))));
    assert!(matches!(run(b"ctorch._utils\n_rebuild_tensor_v2\n)R."), Err(PickleError::Tensor(_))));
    assert_eq!(run(b"ctorch._utils\n_rebuild_parameter\nN\x89}\x87R."), kind("a tensor", "None"));
    assert_eq!(run(b"ctorch\nFloatStorage\n."), kind("plain data", "a class or function name"));
}

#[test]
fn a_good_tensor_is_accepted() {
    for (class, numel) in [("FloatStorage", 4), ("HalfStorage", 8), ("DoubleStorage", 2), ("ByteStorage", 16)]
    {
        let pickle = [tensor(class, "0", numel, 0, &[2, 1], &[1, 1]), b".".to_vec()].concat();
        assert!(matches!(run(&pickle), Ok(Value::Tensor(_))), "{class}");
    }
    let empty = [tensor("FloatStorage", "0", 4, 9, &[0, 5], &[1, 1]), b".".to_vec()].concat();
    assert!(matches!(run(&empty), Ok(Value::Tensor(_))), "an empty view touches nothing");
}

#[test]
fn declared_sizes_are_compared_with_the_archive() {
    for numel in [0, 3, 5, i64::MAX, i64::MAX / 4] {
        let fault = tensor_fault(numel, 0, &[1], &[1]);
        assert!(fault.contains("holds 16 bytes"), "{numel}: {fault}");
    }
    assert!(tensor_fault(-1, 0, &[1], &[1]).contains("-1"));
    let missing = [tensor("FloatStorage", "1", 4, 0, &[1], &[1]), b".".to_vec()].concat();
    assert!(run(&missing).expect_err("a refusal").to_string().contains("missing from the archive"));
}

#[test]
fn views_stay_inside_their_storage() {
    let beyond = "reaches beyond storage";
    assert!(tensor_fault(4, 0, &[5], &[1]).contains(beyond));
    assert!(tensor_fault(4, 4, &[1], &[1]).contains(beyond));
    assert!(tensor_fault(4, 0, &[2, 2], &[3, 1]).contains(beyond));
    assert!(tensor_fault(4, i64::MAX, &[2], &[i64::MAX]).contains(beyond));
    assert!(
        tensor_fault(4, 0, &[i64::MAX, i64::MAX], &[0, 0]).contains(beyond),
        "an overflowing element count"
    );
    assert!(tensor_fault(4, 0, &[i64::MAX], &[i64::MAX]).contains(beyond));
    assert!(tensor_fault(4, 0, &[-1], &[1]).contains("dimension is -1"));
    assert!(tensor_fault(4, 0, &[1], &[-1]).contains("stride is -1"));
    assert!(tensor_fault(4, -1, &[1], &[1]).contains("offset is -1"));
    assert!(tensor_fault(4, 0, &[1, 1], &[1]).contains("differ in length"));
    assert!(tensor_fault(4, 0, &[1; 9], &[1; 9]).contains("dimensions"));
}

#[test]
fn a_stride_0_giant_is_refused_before_it_is_made() {
    let side = 1 << 20;
    let layer =
        [b"}\x8c\x08rotation".to_vec(), tensor("FloatStorage", "0", 4, 0, &[side, side], &[0, 0])].concat();
    let pickle = [b"}\x8c\x06layers}K\x00".as_slice(), &layer, b"sss."].concat();
    let message = refusal(&zip_of(&[("a/data.pkl", &pickle), ("a/data/0", &[0; 16])]));
    assert!(message.contains("1048576"), "{message}");
}

#[test]
fn the_stack_the_marks_and_the_memo_are_checked() {
    for pickle in
        [&b"."[..], b"0.", b"2.", b"a.", b"s.", b"\x85.", b"R.", b"Q.", b"q\x00.", b"\x93.", b"(.", b"N(0."]
    {
        assert_eq!(run(pickle), Err(PickleError::StackUnderflow), "{pickle:?}");
    }
    for pickle in [&b"t."[..], b"l.", b"d.", b"1.", b"]e.", b"}u."] {
        assert_eq!(run(pickle), Err(PickleError::NoMark), "{pickle:?}");
    }
    assert_eq!(run(b"h\x07."), Err(PickleError::EmptyMemo(7)));
    assert_eq!(run(b"j\xff\xff\xff\xff."), Err(PickleError::EmptyMemo(u32::MAX)));
    assert_eq!(
        run(b"(Nd.").map_err(|e| e.to_string()),
        Err("expected key and value pairs, found an odd number".into())
    );
    assert_eq!(run(b"N."), Ok(Value::None));
    assert_eq!(run(b"N.N"), Err(PickleError::TrailingBytes(1)));
    assert_eq!(run(b"\x80\x01N."), Err(PickleError::Protocol(1)));
    assert_eq!(run(b"\x80\x06N."), Err(PickleError::Protocol(6)));
}

#[test]
fn numbers_and_text_are_read_exactly() {
    assert_eq!(run(b"J\xff\xff\xff\xff."), Ok(Value::Int(-1)));
    assert_eq!(run(b"\x8a\x00."), Ok(Value::Int(0)));
    assert_eq!(run(b"\x8a\x02\x00\xff."), Ok(Value::Int(-256)));
    assert_eq!(run(b"\x8b\x01\x00\x00\x00\x7f."), Ok(Value::Int(127)));
    assert_eq!(run(b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x00."), Err(PickleError::WideInteger(9)));
    assert_eq!(run(b"G\x3f\xf8\x00\x00\x00\x00\x00\x00."), Ok(Value::Float(1.5)));
    assert_eq!(run(b"X\x01\x00\x00\x00\xff."), Err(PickleError::NotUtf8));
    assert_eq!(run(b"X\xff\xff\xff\xffabc."), Err(PickleError::Truncated));
    assert_eq!(run(b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc."), Err(PickleError::Truncated));
    assert_eq!(run(b"\x8b\xff\xff\xff\xff"), Err(PickleError::WideInteger(0xffff_ffff)));
}

#[test]
fn deep_nesting_is_bounded() {
    for opener in [&b"]"[..], b"("] {
        let deep = opener.repeat(100_000);
        let closers = if opener == b"]" { b"a".repeat(99_999) } else { b"t".repeat(100_000) };
        let fault = run(&[deep, closers, b".".to_vec()].concat()).expect_err("a refusal");
        assert_eq!(fault, PickleError::Limit { what: "levels of nesting", limit: Limits::default().depth });
    }
}

#[test]
fn memo_bombs_and_cycles_are_bounded() {
    // Each list holds the one before it twice: 2^k leaves after k steps.
    let mut bomb = b"]q\x00".to_vec();
    for slot in 1..30u8 {
        bomb.extend([b']', b'q', slot, b'h', slot - 1, b'a', b'h', slot - 1, b'a']);
    }
    bomb.push(b'.');
    assert_eq!(run(&bomb), Err(PickleError::Limit { what: "values", limit: Limits::default().values }));
    let cycle = run(b"]q\x00h\x00a.").expect_err("a refusal");
    assert!(matches!(cycle, PickleError::Limit { what: "levels of nesting", .. }));
    let shared = run(b"]q\x00(h\x00h\x00t.").expect("sharing is fine");
    assert_eq!(shared, Value::Tuple(vec![Value::List(vec![]), Value::List(vec![])]));
    let endless = b"N0".repeat(Limits::default().operations);
    assert!(matches!(run(&endless), Err(PickleError::Limit { what: "opcodes", .. })));
}

#[test]
fn long_shared_text_cannot_flood_the_metadata() {
    let mut pickle = b"}(X\x06\x00\x00\x00layers}X\x04\x00\x00\x00note".to_vec();
    pickle.extend(b"(X\x00\x80\x00\x00");
    pickle.extend([b'x'; 0x8000]);
    pickle.extend(b"q\x01h\x01h\x01tu.");
    assert!(refusal(&zip_of(&[("a/data.pkl", &pickle)])).contains("metadata"));
}

#[test]
fn wrong_structures_are_explained() {
    let layers = |entry: &[u8]| [b"}\x8c\x06layers}", entry, b"ss."].concat();
    let good = tensor("FloatStorage", "0", 4, 0, &[2, 2], &[2, 1]);
    let oblong = tensor("FloatStorage", "0", 4, 0, &[1, 4], &[4, 1]);
    let short = tensor("FloatStorage", "0", 4, 0, &[1], &[1]);
    let whole = tensor("IntStorage", "0", 4, 0, &[2, 2], &[2, 1]);
    let rotation = |tensor: &[u8]| layers(&[b"K\x05}\x8c\x08rotation", tensor, b"s"].concat());
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"N.".to_vec(), "the top value is None"),
        (b"}.".to_vec(), "no 'layers'"),
        (b"}\x8c\x06layersNs.".to_vec(), "'layers' is None"),
        (b"}\x8c\x06layers}s.".to_vec(), "no layers"),
        (b"}K\x01Ns.".to_vec(), "a top-level key is an int"),
        (b"}\x8c\x0eformat_versionK\x04s.".to_vec(), "format_version 4 is unknown"),
        (b"}\x8c\x0eformat_versionNs.".to_vec(), "format_version is None"),
        (b"}\x8c\x09objectiveK\x01s.".to_vec(), "objective is an int"),
        (layers(b"N}"), "a layer key is None"),
        (layers(b"J\xff\xff\xff\xff}"), "-1 is not a layer number"),
        (layers(b"\x8c\x02+1}"), "not a layer number"),
        (layers(b"K\x05N"), "layer 5: the entry is None"),
        (layers(b"K\x05}"), "layer 5: it has no rotation"),
        (layers(b"K\x05}\x8c\x08layer_idK\x06s"), "layer 5: its layer_id says 6"),
        (layers(b"K\x05}\x8c\x08rotationK\x06s"), "layer 5: rotation is an int"),
        (rotation(&oblong), "layer 5, rotation: shape [1, 4], expected [d, d]"),
        (rotation(&whole), "holds I32, not floating-point"),
        (
            layers(&[b"K\x05}(\x8c\x08rotation", &good[..], b"\x8c\x0beigenvalues", &short, b"u"].concat()),
            "layer 5, eigenvalues: shape [1], expected [2]",
        ),
        (
            [
                &b"}\x8c\x06layers}(K\x05}\x8c\x08rotation"[..],
                &good,
                b"s\x8c\x015}\x8c\x08rotation",
                &good,
                b"sus.",
            ]
            .concat(),
            "layer 5: the layer occurs twice",
        ),
    ];
    for (pickle, expected) in cases {
        let message = refusal(&zip_of(&[("a/data.pkl", &pickle), ("a/data/0", &[0; 16])]));
        assert!(message.contains(expected), "expected {expected:?}, got {message:?}");
    }
    let file = zip_of(&[("a/data.pkl", &rotation(&good)), ("a/data/0", &[0; 16])]);
    assert_eq!(read(&file).expect("without a version it is format 1").format_version, 1);
}

proptest! {
    #[test]
    fn random_pickles_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = run(&bytes);
    }

    /// Opcodes the machine knows, in random order, get much deeper than random bytes do.
    #[test]
    fn random_programs_never_panic(
        steps in proptest::collection::vec(prop::sample::select(vec![
            &b"("[..], b"0", b"1", b"2", b"N", b"\x88", b"K\x03", b"\x8a\x01\xff", b"\x8c\x010", b"\x8c\x07storage",
            b"]", b"l", b"a", b"e", b")", b"t", b"\x85", b"\x86", b"\x87", b"}", b"d", b"s", b"u", b"q\x00", b"q\x01",
            b"\x94", b"h\x00", b"h\x01", b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n",
            b"ccollections\nOrderedDict\n", b"\x93", b"R", b"Q",
        ]), 0..120),
    ) {
        let mut program = steps.concat();
        program.push(b'.');
        let _ = run(&program);
    }

    #[test]
    fn damaged_torch_pickles_never_panic(v3 in any::<bool>(), at in any::<prop::sample::Index>(), value in any::<u8>()) {
        let mut pickle = if v3 { entry(V3, "v3/data.pkl") } else { entry(V1, "v1/data.pkl") };
        let at = at.index(pickle.len());
        pickle[at] = value;
        let _ = unpickle(&pickle, &|_| Some(256), &Limits::default());
        let _ = unpickle(&pickle[..at], &|_| Some(256), &Limits::default());
    }
}
