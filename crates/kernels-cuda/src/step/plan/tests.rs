use super::*;
use oscar_codec::{CodedPageId, FullPageId, SlidingPageId};

#[test]
fn tables_name_rows_pages_and_tiles() {
    let full = [Some(FullPageId(4)), None, Some(FullPageId(7)), Some(FullPageId(8)), Some(FullPageId(2))];
    let coded = [None, Some(CodedPageId(3)), Some(CodedPageId(0))];
    let short = [Some(FullPageId(9))];
    let windows = Windows::new(64, 64).unwrap();
    let sequences = [
        SequenceRows {
            rows: 1..3,
            first_position: 270,
            full: &full,
            coded: &coded,
            sliding: &[],
            demote: 176..208,
            demote_values: 176..208,
            view: None,
            states: None,
        },
        SequenceRows {
            rows: 0..1,
            first_position: 5,
            full: &short,
            coded: &[],
            sliding: &[],
            demote: 0..0,
            demote_values: 0..0,
            view: None,
            states: None,
        },
    ];
    // Tile 176 lies in block 2, tile 192 in block 3, which has no coded page.
    let mut words = Words::default();
    assert!(words.fill(&windows, Storage::Codes, &sequences).unwrap_err().to_string().contains("block 3"));
    let sequences = [SequenceRows { demote: 176..192, ..sequences[0].clone() }, sequences[1].clone()];
    let summary = words.fill(&windows, Storage::Codes, &sequences).unwrap();
    assert_eq!((summary.rows, summary.full_pages, summary.coded_pages), (3, 10, 4));
    assert!(!summary.decode && summary.longest == 272 && summary.tiles == 1);
    assert_eq!(summary.sequences[0].boundary as usize, windows.boundary(271));
    // What it codes was there before, and is coded before its first layer: then all codes are old.
    assert!(summary.quantizes_ahead && summary.tiles == 1);
    let old_codes = |s: &StepSummary| s.sequences.iter().map(|s| s.old_codes).collect::<Vec<_>>();
    assert_eq!(old_codes(&summary), [windows.boundary(271) as u32, 6]);
    // Rows that the step itself brings are coded when a layer has made them, and so is everything
    // else.
    let prompt = SequenceRows { rows: 1..82, first_position: 191, ..sequences[0].clone() };
    let by_layer = [prompt, sequences[1].clone()];
    let summary_by_layer = Words::default().fill(&windows, Storage::Codes, &by_layer).unwrap();
    assert!(!summary_by_layer.quantizes_ahead && summary_by_layer.tiles == 1);
    assert_eq!(old_codes(&summary_by_layer), [128, 6], "the page of tile 176 begins at 128");
    // Another sequence that reads the page is told, one that has another page there is not.
    let reader = SequenceRows { rows: 82..83, demote: 0..0, ..sequences[0].clone() };
    let elsewhere = [None, Some(CodedPageId(3)), Some(CodedPageId(1))];
    let other = SequenceRows { rows: 83..84, coded: &elsewhere, ..reader.clone() };
    let all = [by_layer[0].clone(), by_layer[1].clone(), reader, other];
    let shared = Words::default().fill(&windows, Storage::Codes, &all).unwrap();
    assert_eq!(old_codes(&shared)[2..], [128, windows.boundary(270) as u32]);
    let w = &words.words;
    assert_eq!(w[words.row_sequence..][..3], [1, 0, 0]);
    assert_eq!(w[words.row_position..][..3], [5, 270, 271]);
    assert_eq!(w[words.full..][..6], [4, NO_PAGE, 7, 8, 2, 9]);
    assert_eq!(w[words.coded..][..6], [NO_PAGE, 3, 0, NO_PAGE, NO_PAGE, NO_PAGE]);
    assert_eq!(w[words.demoted..], [7, 0, 3]);
}

/// A hit of 400 tokens whose blocks 1 to 3 have codes alone, although the windows would read 240 and
/// later in BF16.
#[test]
fn queries_over_codes_in_the_window_go_one_by_one() {
    let full: Vec<_> = (0..9).map(|b| (!(1..4).contains(&b)).then_some(FullPageId(b))).collect();
    let coded: Vec<_> = (0..9).map(|b| (1..4).contains(&b).then_some(CodedPageId(b))).collect();
    let windows = Windows::new(64, 160).unwrap();
    let rows = SequenceRows {
        rows: 2..52,
        first_position: 400,
        full: &full,
        coded: &coded,
        sliding: &[],
        demote: 0..0,
        demote_values: 0..0,
        view: None,
        states: None,
    };
    assert_eq!((rows.coded_until(), windows.boundary(400), windows.boundary(415)), (256, 240, 256));
    let mut words = Words::default();
    let sequences = [SequenceRows { rows: 0..2, first_position: 20, ..rows.clone() }, rows];
    let summary = words.fill(&windows, Storage::Codes, &sequences).unwrap();
    // Its own boundary is the sink until far later, so both of the first sequence's rows go alone.
    assert_eq!(summary.sequences.len(), 2 + 15 + 1);
    for (i, info) in summary.sequences[2..17].iter().enumerate() {
        let wanted = SequenceInfo {
            first_row: 2 + i as u32,
            rows: 1,
            first_position: 400 + i as u32,
            table: 1,
            old_codes: 0, // it reads tokens of this step beside its own
            boundary: 256,
            view: NO_VIEW,
            view_end: 0,
        };
        assert_eq!(*info, wanted);
    }
    let rest = summary.sequences[17];
    assert_eq!((rest.first_row, rest.rows, rest.first_position, rest.table), (17, 35, 415, 1));
    assert_eq!(rest.boundary as usize, windows.boundary(449));
    assert_eq!(summary.sequences[0].boundary, 21, "never beyond the query itself");
    let w = &words.words;
    assert_eq!(
        w[words.row_sequence..][..20],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 17, 17]
    );
    assert_eq!(
        w[words.row_position..][..20],
        [20, 21, 400, 401, 402, 403, 404, 405, 406, 407, 408, 409, 410, 411, 412, 413, 414, 415, 416, 417]
    );
    assert_eq!(w[words.full..][..5], [0, 0, NO_PAGE, NO_PAGE, NO_PAGE]);
    // A decoded history is never read by this rule.
    let summary = words.fill(&windows, Storage::Dequantized, &sequences).unwrap();
    assert_eq!((summary.sequences.len(), summary.tiles), (2, 0));
}

#[test]
fn new_tokens_of_short_contexts_are_read_in_bf16() {
    let windows = Windows::new(64, 64).unwrap();
    let full = [Some(FullPageId(9))];
    let rows = SequenceRows {
        rows: 0..1,
        first_position: 20,
        full: &full,
        coded: &[],
        sliding: &[],
        demote: 0..0,
        demote_values: 0..0,
        view: None,
        states: None,
    };
    for storage in [Storage::Codes, Storage::Dequantized, Storage::Bf16] {
        let summary = Words::default().fill(&windows, storage, std::slice::from_ref(&rows)).unwrap();
        assert!(summary.only_new_tokens(&windows));
    }
    let two = SequenceRows { rows: 0..2, ..rows };
    let summary = Words::default().fill(&windows, Storage::Codes, &[two]).unwrap();
    assert!(!summary.only_new_tokens(&windows));
}

/// Sliding layers read the same sequences and rows through a table of their own.
#[test]
fn sliding_layers_have_their_own_page_table() {
    let windows = Windows::new(64, 64).unwrap();
    let full: Vec<_> = (0..5).map(|b| Some(FullPageId(b))).collect();
    let sliding = [None, None, Some(SlidingPageId(6)), Some(SlidingPageId(1)), Some(SlidingPageId(3))];
    let rows = SequenceRows {
        rows: 0..2,
        first_position: 270,
        full: &full,
        coded: &[],
        sliding: &sliding,
        demote: 0..0,
        demote_values: 0..0,
        view: None,
        states: None,
    };
    let short = SequenceRows { rows: 2..3, first_position: 9, sliding: &sliding[2..], ..rows.clone() };
    let mut words = Words::default();
    let summary = words.fill(&windows, Storage::Bf16, &[rows.clone(), short]).unwrap();
    assert_eq!(words.words[words.sliding..][..7], [NO_PAGE, NO_PAGE, 6, 1, 3, 6, NO_PAGE]);
    assert_eq!((summary.full_pages, summary.sliding_pages, words.words.len()), (5, 7, words.demoted));
    let tables = words.tables(DevicePtr::new(1 << 20).unwrap(), None, &windows, &summary);
    let of_sliding = words.of_sliding(&tables).unwrap();
    assert_eq!(of_sliding.full.address(), (1 << 20) + 4 * words.sliding as u64);
    assert_eq!(of_sliding.row_position.address(), tables.row_position.address());
    assert_eq!((of_sliding.demoted_count, of_sliding.rows), (0, 3));

    let plain = SequenceRows { sliding: &[], ..rows };
    let summary = words.fill(&windows, Storage::Bf16, &[plain]).unwrap();
    assert_eq!((words.sliding, summary.sliding_pages), (words.demoted, 0));
    assert!(words.of_sliding(&tables).is_none());
}
