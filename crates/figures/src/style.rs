//! Colours and type of pages and pictures, light and dark.

/// Shared by page and picture. Font sizes are in units of the figures.
macro_rules! colours {
    () => {
        ":root,svg{color-scheme:light dark;--ink:#1b1f24;--soft:#5b6570;--line:#dfe4e9;--paper:#fff;--card:#f6f8fa;--ours:#1f5fd6;--theirs:#b5651d;--base:#6b7480;\
--h0:#d64545;--h1:#e58a5a;--h2:#e9c46a;--h3:#9fce8a;--h4:#3f9d63}\
@media(prefers-color-scheme:dark){:root,svg{--ink:#e6e9ed;--soft:#a3adb8;--line:#2f363e;--paper:#14171a;--card:#1d2126;--ours:#78a6ff;--theirs:#eba35f;--base:#9aa4af;\
--h0:#b23b3b;--h1:#b8693f;--h2:#a98b34;--h3:#5f8f4e;--h4:#2e7d4f}}\
svg text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:var(--soft);font-size:11px}svg text.head{font-size:13px;font-weight:600;fill:var(--ink)}\
svg text.name{font-size:11.5px;fill:var(--ink);paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}svg text.name.ours{fill:var(--ours);font-weight:600}svg text.name.best{font-weight:700}.end{text-anchor:end}.mid{text-anchor:middle}\
.grid{stroke:var(--line)}.lead{stroke:var(--soft);stroke-width:.7}polyline{fill:none;stroke-width:1.6;stroke-linejoin:round}.front{stroke:var(--ours);stroke-dasharray:5 4;stroke-opacity:.75}\
polyline.base{stroke:var(--base);fill:none}polyline.theirs{stroke:var(--theirs);fill:none}polyline.ours{stroke:var(--ours);stroke-width:2;fill:none}\
polyline.thin{stroke:var(--ours);stroke-width:.8;stroke-opacity:.35}polyline.thin.theirs{stroke:var(--theirs);stroke-opacity:.45}\
circle{stroke:var(--paper);stroke-width:1.2}.ours{fill:var(--ours)}.theirs{fill:var(--theirs)}.base{fill:var(--base)}.light{fill-opacity:.45}circle.best{stroke:var(--ink);stroke-width:1.6}\
svg text.theirs,svg text.base{fill:var(--ink)}.none{fill:var(--card)}.cell{fill:var(--ours)}svg text.value{font-size:10px;fill:var(--ink)}svg text.on{fill:#fff}\
.heat0{fill:var(--h0)}.heat1{fill:var(--h1)}.heat2{fill:var(--h2)}.heat3{fill:var(--h3)}.heat4{fill:var(--h4)}\
svg text.in0,svg text.in4{fill:#fff;font-weight:600}svg text.in1,svg text.in2,svg text.in3{fill:#16191c;font-weight:600}"
    };
}

pub const PICTURE: &str = concat!(colours!(), ".paper{fill:var(--paper)}");

pub const PAGE: &str = concat!(
    colours!(),
    "body{margin:0 auto;max-width:1120px;padding:16px;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}\
h1{font-size:1.45rem;margin:.2em 0}h2{font-size:1.12rem;margin:2em 0 .2em}p{color:var(--soft);margin:.3em 0 1em}\
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:1em 0}\
.tile{background:var(--card);border-radius:8px;padding:10px 12px}.tile b{display:block;font-size:1.3rem}.tile span{color:var(--soft);font-size:.85rem}\
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:16px}\
.small{display:grid;grid-template-columns:repeat(auto-fit,minmax(260px,1fr));gap:8px}\
.maps{display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));gap:14px 18px}\
svg{width:100%;height:auto;display:block}.wide,.figure{overflow-x:auto}.pair>*{min-width:0}\
table{border-collapse:collapse;font-size:.85rem}td,th{padding:4px 9px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}\
th{color:var(--soft);font-weight:600}td:first-child,th:first-child{text-align:left;position:sticky;left:0;background:var(--paper)}\
tr.ours td:first-child{color:var(--ours);font-weight:600}td.text,th.text{text-align:left;white-space:normal;min-width:8em;overflow-wrap:anywhere}\
code{background:var(--card);padding:2px 5px;border-radius:4px;overflow-wrap:anywhere}\
li{color:var(--soft)}.key i{display:inline-block;width:.75em;height:.75em;border-radius:50%;margin:0 .4em 0 1em}\
.key .ours{background:var(--ours)}.key .theirs{background:var(--theirs)}.key .base{background:var(--base)}\
@media(max-width:520px){body{padding:10px}.maps{grid-template-columns:repeat(2,1fr)}.pair .figure svg{min-width:460px}}"
);
