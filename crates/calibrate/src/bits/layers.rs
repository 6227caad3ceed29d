//! The layers that have widths.

use oscar_models::DecoderConfig;

/// The layers of a model that have widths: those with full attention. A sliding layer keeps its
/// window in BF16, so it has no units. Tables and harms count the layers of this list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WidthLayers {
    /// Layers of the model.
    depth: usize,
    list: Vec<usize>,
}

impl WidthLayers {
    pub fn of(config: &DecoderConfig) -> Self {
        Self { depth: config.layers, list: config.full_attention_layers() }
    }

    /// Every layer of a model.
    pub fn all(depth: usize) -> Self {
        Self { depth, list: (0..depth).collect() }
    }

    /// Their numbers in the model, ascending.
    pub fn list(&self) -> &[usize] {
        &self.list
    }

    pub fn count(&self) -> usize {
        self.list.len()
    }

    /// The place of a layer of the model in the list; `None` if it slides.
    pub fn place(&self, layer: usize) -> Option<usize> {
        self.list.binary_search(&layer).ok()
    }

    pub fn depth(&self) -> usize {
        self.depth
    }

    /// What `tokens` cost that are read from the layer at `place` on, in tokens through the whole
    /// model.
    pub fn work_from(&self, place: usize, tokens: usize) -> usize {
        tokens * (self.depth - self.list[place]) / self.depth.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_models::tiny::tiny_config;
    use oscar_models::{Family, SlidingLayers};

    #[test]
    fn sliding_layers_have_no_place_and_work_counts_all_layers() {
        let tiny = DecoderConfig { layers: 6, ..tiny_config(Family::Gemma3) };
        let sliding = Some(SlidingLayers { window: 512, layers: vec![0, 1, 3, 4], rope: None });
        let layers = WidthLayers::of(&DecoderConfig { sliding, ..tiny.clone() });
        assert_eq!((layers.list(), layers.count(), layers.depth()), (&[2, 5][..], 2, 6));
        assert_eq!([2, 3, 5].map(|layer| layers.place(layer)), [Some(0), None, Some(1)]);
        // Layers 2 to 5, and layer 5 alone.
        assert_eq!([0, 1].map(|place| layers.work_from(place, 60)), [40, 10]);
        assert_eq!(WidthLayers::of(&DecoderConfig { sliding: None, ..tiny }), WidthLayers::all(6));
    }
}
