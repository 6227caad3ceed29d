//! The AMX tile registers: their shapes, and who may use them when.
//!
//! A kernel call loads the configuration it needs at its start, on the thread it runs on, and
//! releases it at its end: a thread owns no tile state between calls. Values live in tile registers
//! only inside one `asm!` block, so the compiler need not know of them. (The AMX intrinsics are not
//! stable yet; the assembler knows the instructions on every target.)

use std::arch::asm;

/// Bytes of a full row of a tile register.
pub(crate) const TILE_ROW_BYTES: u16 = 64;

/// The operand of `ldtilecfg`, palette 1: eight tile registers.
#[repr(C, align(64))]
pub(crate) struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileConfig {
    /// Tile registers 0 to 7 with these numbers of rows (1 to 16) and bytes in a row (4 to 64).
    pub(crate) const fn new(rows: [u8; 8], row_bytes: [u16; 8]) -> Self {
        let mut config =
            Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let mut tile = 0;
        while tile < 8 {
            assert!(0 < rows[tile] && rows[tile] <= 16, "a tile has 1 to 16 rows");
            assert!(0 < row_bytes[tile] && row_bytes[tile] <= TILE_ROW_BYTES, "a row has up to 64 bytes");
            config.rows[tile] = rows[tile];
            config.row_bytes[tile] = row_bytes[tile];
            tile += 1;
        }
        config
    }

    /// Tile registers with these numbers of rows, all rows 64 bytes.
    pub(crate) const fn full_width(rows: [u8; 8]) -> Self {
        Self::new(rows, [TILE_ROW_BYTES; 8])
    }

    /// Gives this thread's tile registers these shapes, and zeroes them.
    ///
    /// # Safety
    /// [`crate::Variant::Amx`] must be available.
    pub(crate) unsafe fn load(&self) {
        // SAFETY: the operand is 64 readable bytes in the documented form; instructions as the
        // caller vouches.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) std::ptr::from_ref(self),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags));
        }
    }
}

/// Gives the tile registers back, so that context switches need not save them.
///
/// # Safety
/// [`crate::Variant::Amx`] must be available.
pub(crate) unsafe fn release() {
    // SAFETY: as the caller vouches; no tile register holds anything that is needed.
    unsafe {
        asm!("tilerelease",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nomem, nostack, preserves_flags));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_has_the_documented_form() {
        assert_eq!((size_of::<TileConfig>(), align_of::<TileConfig>()), (64, 64));
        assert_eq!(std::mem::offset_of!(TileConfig, row_bytes), 16);
        assert_eq!(std::mem::offset_of!(TileConfig, rows), 48);
        let config = TileConfig::new([16, 16, 5, 5, 16, 5, 16, 16], [64, 64, 64, 64, 32, 32, 64, 64]);
        assert_eq!(config.rows, [16, 16, 5, 5, 16, 5, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(config.row_bytes, [64, 64, 64, 64, 32, 32, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!((config.palette, config.start_row, config.reserved), (1, 0, [0; 14]));
    }

    #[test]
    #[should_panic(expected = "1 to 16 rows")]
    fn a_tile_without_rows_is_refused() {
        TileConfig::full_width([16, 16, 16, 16, 16, 16, 16, 0]);
    }
}
