//! Conversion between f32 and BF16, which is the upper half of an f32.

/// The BF16 nearest to `x`, ties to even; NaN stays NaN (quiet), overflow becomes infinity.
#[inline(always)]
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    // Adding just under half of the last kept place, plus its lowest bit, carries exactly when
    // rounding up is due. A NaN could carry into infinity or lose all its mantissa, so it is cut
    // instead and made quiet.
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let nan = bits >> 16 | 0x40;
    (if x.is_nan() { nan } else { rounded }) as u16
}

/// The f32 equal to a BF16 given by its bits.
#[inline(always)]
pub fn f32_from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    #[test]
    fn ties_go_to_even_and_specials_survive() {
        let cases = [
            (0x3f80_8000, 0x3f80), // a tie above an even place
            (0x3f81_8000, 0x3f82), // a tie above an odd place
            (0x3f80_8001, 0x3f81),
            (0x7f7f_ffff, 0x7f80), // largest f32
            (0xff80_0000, 0xff80), // -infinity
            (0x8000_0000, 0x8000), // -0
            (0x7f80_0001, 0x7fc0), // signalling NaN: quiet, not infinity
            (0xffff_ffff, 0xffff),
            (0x0000_8001, 0x0001), // subnormal
        ];
        for (bits, expected) in cases {
            assert_eq!(f32_to_bf16(f32::from_bits(bits)), expected, "{bits:08x}");
        }
    }

    #[test]
    fn every_bf16_survives_the_round_trip() {
        for bits in 0..=u16::MAX {
            let value = f32_from_bf16(bits);
            if value.is_nan() {
                assert!(f32_from_bf16(f32_to_bf16(value)).is_nan());
            } else {
                assert_eq!(f32_to_bf16(value), bits);
            }
        }
    }

    proptest! {
        #[test]
        fn agrees_with_the_half_crate(bits: u32) {
            let x = f32::from_bits(bits);
            prop_assert_eq!(f32_to_bf16(x), bf16::from_f32(x).to_bits());
        }
    }
}
