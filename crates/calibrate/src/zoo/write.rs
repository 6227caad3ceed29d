//! Writes rotation files that `torch.load(weights_only=True)` reads: formats 1 and 2.
//!
//! Invariant: the same [`ZooFile`] always gives the same bytes, and for the zoo's own files the
//! pickle is byte for byte what `torch.save` makes (protocol 2, the same memo numbering).

use std::collections::HashMap;
use std::io::{Cursor, Write};
use std::path::Path;

use oscar_figures::write_whole;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, DateTime, ZipWriter};

use super::ZooError;
use super::file::{ZooFile, ZooLayer};

/// torch names the folder inside the zip after the file, or this when it writes to a buffer.
const ARCHIVE: &str = "archive";
/// torch lets readers map storages in place; it aligns them to this.
const STORAGE_ALIGNMENT: u16 = 64;

/// Writes `file` at `path`, whole or not at all.
pub fn write(file: &ZooFile, path: &Path) -> Result<(), ZooError> {
    write_whole(path, to_bytes(file)?).map_err(|source| ZooError::Io { path: path.to_owned(), source })
}

/// The bytes of `file` in the format its `format_version` names.
pub fn to_bytes(file: &ZooFile) -> Result<Vec<u8>, ZooError> {
    file.validate()?;
    check_format(file)?;
    let (pickle, storages) = pickle(file);

    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .last_modified_time(DateTime::default())
        .with_alignment(STORAGE_ALIGNMENT);
    let mut record = |name: &str, bytes: &[u8]| -> Result<(), ZooError> {
        zip.start_file(format!("{ARCHIVE}/{name}"), options)?;
        zip.write_all(bytes).map_err(|source| ZooError::Zip(source.into()))
    };
    record("data.pkl", &pickle)?;
    record(".format_version", b"1")?;
    record(".storage_alignment", STORAGE_ALIGNMENT.to_string().as_bytes())?;
    record("byteorder", b"little")?;
    for (key, values) in storages.iter().enumerate() {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        record(&format!("data/{key}"), &bytes)?;
    }
    record("version", b"3\n")?;
    Ok(zip.finish()?.into_inner())
}

/// Formats 1 and 2 differ in the rank of `rotation`; neither can hold format 3's companions.
fn check_format(file: &ZooFile) -> Result<(), ZooError> {
    let version = file.format_version;
    let refuse = |reason: String| Err(ZooError::CannotWrite { version, reason });
    if !(1..=2).contains(&version) {
        return refuse("only formats 1 and 2 can be written".into());
    }
    for (id, layer) in &file.layers {
        if layer.heads.is_some() != (version == 2) {
            return refuse(match version {
                1 => format!("layer {id} has one rotation a head; set format_version to 2"),
                _ => format!("layer {id} has one rotation for all heads; set format_version to 1"),
            });
        }
        if layer.q_rotation.is_some() || layer.k_mean.is_some() || layer.o_rotation.is_some() {
            return refuse(format!("layer {id} has q_rotation, k_mean or o_rotation, which need format 3"));
        }
    }
    if let Some(key) = file
        .metadata
        .keys()
        .find(|k| ["format_version", "objective", "source_grouping", "layers"].contains(&k.as_str()))
    {
        return refuse(format!("metadata key {key:?} is the name of a field"));
    }
    Ok(())
}

/// `data.pkl` and, in the order of their keys 0, 1, ..., the storages it names.
fn pickle(file: &ZooFile) -> (Vec<u8>, Vec<&[f32]>) {
    let mut out = Pickler { bytes: vec![0x80, 2], memo: HashMap::new(), slots: 0, storages: Vec::new() };
    let mut top: Vec<TopEntry> = vec![
        ("format_version", TopValue::Version(file.format_version)),
        ("objective", TopValue::Text(&file.objective)),
        ("source_grouping", TopValue::Text(&file.source_grouping)),
    ];
    top.extend(file.metadata.iter().map(|(key, text)| (key.as_str(), TopValue::Text(text))));
    top.push(("layers", TopValue::Layers));
    out.dict(&top, |out, (key, value)| {
        out.unique_text(key);
        match value {
            TopValue::Version(version) => out.int(*version as usize),
            TopValue::Text(text) => out.unique_text(text),
            TopValue::Layers => {
                let layers: Vec<_> = file.layers.iter().collect();
                out.dict(&layers, |out, &(&id, layer)| {
                    out.int(id as usize);
                    out.layer(id, layer);
                });
            }
        }
    });
    out.bytes.push(b'.');
    (out.bytes, out.storages)
}

type TopEntry<'a> = (&'a str, TopValue<'a>);

enum TopValue<'a> {
    Version(u32),
    Text(&'a str),
    Layers,
}

/// Emits opcodes the way CPython's protocol 2 pickler does.
struct Pickler<'a> {
    bytes: Vec<u8>,
    /// Slots of the names that recur: Python pickles an interned string once and refers back to it.
    memo: HashMap<&'static str, usize>,
    slots: usize,
    storages: Vec<&'a [f32]>,
}

impl<'a> Pickler<'a> {
    fn layer(&mut self, id: u32, layer: &'a ZooLayer) {
        let d = layer.head_dim;
        let matrix: Vec<usize> = layer.heads.into_iter().chain([d, d]).collect();
        let vector: Vec<usize> = layer.heads.into_iter().chain([d]).collect();
        let mut tensors = vec![("rotation", matrix, layer.rotation.as_slice())];
        tensors.extend(layer.eigenvalues.as_ref().map(|values| ("eigenvalues", vector, values.as_slice())));

        self.bytes.push(b'}');
        self.put();
        self.bytes.push(b'(');
        self.shared_text("layer_id");
        self.int(id as usize);
        for (name, shape, values) in tensors {
            self.shared_text(name);
            self.tensor(&shape, values);
        }
        self.bytes.push(b'u');
    }

    /// `_rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())`.
    fn tensor(&mut self, shape: &[usize], values: &'a [f32]) {
        self.global("torch._utils\n_rebuild_tensor_v2\n");
        self.bytes.extend(b"((");
        self.shared_text("storage");
        self.global("torch\nFloatStorage\n");
        self.unique_text(&self.storages.len().to_string());
        self.shared_text("cpu");
        self.int(values.len());
        self.bytes.push(b't');
        self.put();
        self.bytes.push(b'Q');
        self.storages.push(values);

        self.int(0);
        self.short_tuple(shape);
        let strides: Vec<usize> = (1..=shape.len()).map(|axis| shape[axis..].iter().product()).collect();
        self.short_tuple(&strides);
        self.bytes.push(0x89);
        self.global("collections\nOrderedDict\n");
        self.bytes.extend(b")R");
        self.put();
        self.bytes.push(b't');
        self.put();
        self.bytes.push(b'R');
        self.put();
    }

    /// A tuple of one to three ints, which have opcodes of their own.
    fn short_tuple(&mut self, items: &[usize]) {
        items.iter().for_each(|&item| self.int(item));
        self.bytes.push(0x84 + items.len() as u8);
        self.put();
    }

    /// A dict in CPython's batches: up to 1000 items at once, a batch of one without a mark.
    fn dict<T>(&mut self, items: &[T], mut entry: impl FnMut(&mut Self, &T)) {
        self.bytes.push(b'}');
        self.put();
        for batch in items.chunks(1000) {
            if let [only] = batch {
                entry(self, only);
                self.bytes.push(b's');
            } else {
                self.bytes.push(b'(');
                batch.iter().for_each(|item| entry(self, item));
                self.bytes.push(b'u');
            }
        }
    }

    fn int(&mut self, n: usize) {
        match n {
            0..=0xff => self.bytes.extend([b'K', n as u8]),
            0x100..=0xffff => {
                self.bytes.push(b'M');
                self.bytes.extend((n as u16).to_le_bytes());
            }
            0x1_0000..=0x7fff_ffff => {
                self.bytes.push(b'J');
                self.bytes.extend((n as u32).to_le_bytes());
            }
            // LONG1; only layer numbers come here, and they fit 32 bits and a zero for the sign.
            _ => {
                self.bytes.extend([0x8a, 5]);
                self.bytes.extend((n as u32).to_le_bytes());
                self.bytes.push(0);
            }
        }
    }

    fn unique_text(&mut self, text: &str) {
        self.bytes.push(b'X');
        self.bytes.extend((text.len() as u32).to_le_bytes());
        self.bytes.extend(text.as_bytes());
        self.put();
    }

    fn shared_text(&mut self, text: &'static str) {
        if !self.recall(text) {
            self.memo.insert(text, self.slots);
            self.unique_text(text);
        }
    }

    fn global(&mut self, lines: &'static str) {
        if !self.recall(lines) {
            self.memo.insert(lines, self.slots);
            self.bytes.push(b'c');
            self.bytes.extend(lines.as_bytes());
            self.put();
        }
    }

    fn recall(&mut self, name: &'static str) -> bool {
        let slot = self.memo.get(name).copied();
        if let Some(slot) = slot {
            self.memo_opcode(b'h', b'j', slot);
        }
        slot.is_some()
    }

    fn put(&mut self) {
        self.memo_opcode(b'q', b'r', self.slots);
        self.slots += 1;
    }

    fn memo_opcode(&mut self, short: u8, long: u8, slot: usize) {
        if slot < 256 {
            self.bytes.extend([short, slot as u8]);
        } else {
            self.bytes.push(long);
            self.bytes.extend((slot as u32).to_le_bytes());
        }
    }
}
