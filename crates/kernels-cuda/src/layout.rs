//! Structs that Rust and the kernels share.
//!
//! [`shared_struct!`] declares such a struct and records its size and the offsets of its fields.
//! [`header`] turns the records of all of them into `layout.cuh`, which every kernel includes, and
//! `CHECK_LAYOUT(Name)` behind the CUDA definition compares them. A drift between the two languages
//! is therefore a compile error of the kernel, which CI finds without a GPU.

use crate::memory::DevicePtr;
use std::sync::OnceLock;

/// Size and field offsets of a shared struct, as Rust has them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub name: &'static str,
    pub size: usize,
    pub fields: &'static [(&'static str, usize)],
}

/// Plain data that a kernel can read: written field by field, so padding bytes are zero.
pub(crate) trait Shared: Copy {
    /// Writes the value; `to` is as long as the type.
    fn write(self, to: &mut [u8]);
}

macro_rules! shared_numbers {
    ($($type:ty),*) => {
        $(impl Shared for $type {
            fn write(self, to: &mut [u8]) {
                to.copy_from_slice(&self.to_ne_bytes());
            }
        })*
    };
}

shared_numbers!(u32, u64, f32);

impl<T: Shared, const N: usize> Shared for [T; N] {
    fn write(self, to: &mut [u8]) {
        for (value, to) in self.into_iter().zip(to.chunks_exact_mut(size_of::<T>())) {
            value.write(to);
        }
    }
}

impl<T> Shared for DevicePtr<T> {
    fn write(self, to: &mut [u8]) {
        self.address().write(to);
    }
}

/// `None` is a null pointer.
impl<T> Shared for Option<DevicePtr<T>> {
    fn write(self, to: &mut [u8]) {
        self.map_or(0, DevicePtr::address).write(to);
    }
}

/// Declares a `#[repr(C)]` struct with the layout of the CUDA struct of the same name.
macro_rules! shared_struct {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident { $($(#[$field_meta:meta])* $field_vis:vis $field:ident: $type:ty),* $(,)? }
    ) => {
        #[repr(C)]
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        $vis struct $name { $($(#[$field_meta])* $field_vis $field: $type),* }

        impl $name {
            pub(crate) const LAYOUT: $crate::layout::Layout = $crate::layout::Layout {
                name: stringify!($name),
                size: size_of::<$name>(),
                fields: &[$((stringify!($field), std::mem::offset_of!($name, $field))),*],
            };
        }

        impl $crate::layout::Shared for $name {
            fn write(self, to: &mut [u8]) {
                $({
                    let at = std::mem::offset_of!($name, $field);
                    $crate::layout::Shared::write(self.$field, &mut to[at..at + size_of::<$type>()]);
                })*
            }
        }
    };
}

pub(crate) use shared_struct;

/// Every struct that is shared. A struct that is missing here does not compile in CUDA, because its
/// `CHECK_LAYOUT` is not defined.
pub(crate) fn all() -> impl Iterator<Item = Layout> {
    use crate::{attention, backend, bandwidth, blocks, gemm, nccl, pages, step};
    [
        attention::LAYOUTS,
        backend::LAYOUTS,
        backend::EXPERT_LAYOUTS,
        backend::VIEW_LAYOUTS,
        backend::SCORE_LAYOUTS,
        bandwidth::LAYOUTS,
        blocks::LAYOUTS,
        gemm::LAYOUTS,
        nccl::LAYOUTS,
        pages::LAYOUTS,
        step::LAYOUTS,
    ]
    .into_iter()
    .flatten()
    .copied()
}

/// The text of `layout.cuh`.
pub(crate) fn header() -> &'static str {
    static HEADER: OnceLock<String> = OnceLock::new();
    HEADER.get_or_init(|| header_of(all()))
}

fn header_of(layouts: impl Iterator<Item = Layout>) -> String {
    // NVRTC has no `offsetof` without headers; `__INTADDR__` is the operator behind it.
    let mut text = String::from("#pragma once\n");
    text += "#define OFFSET_OF(type, field) __INTADDR__(&((type*)0)->field)\n";
    text += "#define CHECK_LAYOUT(name) LAYOUT_##name static_assert(true, \"\")\n";
    for Layout { name, size, fields } in layouts {
        let check = |what: String, value: usize| {
            format!(" static_assert({what} == {value}, \"{what} is {value} in Rust\");")
        };
        text += &format!("#define LAYOUT_{name}{}", check(format!("sizeof({name})"), size));
        for &(field, offset) in fields {
            text += &check(format!("OFFSET_OF({name}, {field})"), offset);
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::{Compiler, compile_with};
    use crate::error::CudaError;
    use crate::sources::{self, Defines, HEADERS, Source};

    /// The text of a source with the headers that it includes.
    fn with_headers(text: &str, all: &mut Vec<&'static str>) {
        for (name, header) in HEADERS {
            if text.contains(&format!("#include \"{name}\"")) && !all.contains(header) {
                all.push(header);
                with_headers(header, all);
            }
        }
    }

    /// A kernel that checks a struct.
    fn kernel_that_checks(name: &str) -> Option<(&'static Source, Defines)> {
        let check = format!("CHECK_LAYOUT({name})");
        sources::variants(90, 227 << 10).into_iter().find(|(source, _)| {
            let mut texts = vec![source.text];
            with_headers(source.text, &mut texts);
            texts.iter().any(|text| text.contains(&check))
        })
    }

    #[test]
    fn every_shared_struct_is_checked_by_a_kernel() {
        assert!(all().count() > 20);
        for layout in all() {
            assert!(kernel_that_checks(layout.name).is_some(), "no kernel checks {}", layout.name);
        }
    }

    #[test]
    fn values_are_written_at_their_offsets_and_padding_is_zero() {
        shared_struct! {
            struct Example { pointer: Option<DevicePtr<f32>>, small: u32, large: u64, list: [u32; 2], end: f32 }
        }
        assert_eq!(
            Example::LAYOUT.fields,
            [("pointer", 0), ("small", 8), ("large", 16), ("list", 24), ("end", 32)]
        );
        let example = Example { pointer: None, small: 1, large: u64::MAX, list: [2, 3], end: 1.0 };
        let mut bytes = [0; size_of::<Example>()];
        example.write(&mut bytes);
        let words: Vec<u32> =
            bytes.chunks_exact(4).map(|b| u32::from_ne_bytes(b.try_into().unwrap())).collect();
        assert_eq!(words, [0, 0, 1, 0, u32::MAX, u32::MAX, 2, 3, 1f32.to_bits(), 0]);
    }

    /// Skipped, aloud, where libnvrtc cannot be loaded, unless `OSCAR_NVRTC` says where it is (as
    /// CI does).
    #[test]
    fn a_struct_that_differs_does_not_compile() {
        match Compiler::open() {
            Ok(_) => {}
            Err(error) if std::env::var_os("OSCAR_NVRTC").is_none() => {
                eprintln!("skipped: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        }
        for wrong in all() {
            let (source, defines) = kernel_that_checks(wrong.name).unwrap();
            let last = wrong.fields.last().map(|&(name, offset)| [(name, offset + 4)]);
            let fields: Option<&'static [(&str, usize)]> =
                last.map(|last| -> &'static [(&str, usize)] { Box::leak(Box::new(last)) });
            let changed = [
                Some((Layout { size: wrong.size + 8, ..wrong }, format!("sizeof({})", wrong.name))),
                fields.map(|fields| {
                    (Layout { fields, ..wrong }, format!("OFFSET_OF({}, {})", wrong.name, fields[0].0))
                }),
            ];
            for (changed, says) in changed.into_iter().flatten() {
                let header = header_of(all().map(|l| if l.name == wrong.name { changed } else { l }));
                match compile_with(source, &defines, "sm_90", &header) {
                    Err(CudaError::Compile { log, .. }) => assert!(log.contains(&says), "{log}"),
                    other => panic!("{} compiled in spite of {changed:?}: {other:?}", source.file),
                }
            }
        }
    }
}
