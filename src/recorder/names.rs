//! Converts the 16 bytes of a recorded call, which hold operation and element type as numbers, to
//! text. Pure.
//!
//! The writer stores its names in the recording, as one text of four lists: templates of operations,
//! element types, reductions, algorithms. A newline separates lists, a tab separates items. The number
//! of an item is its index. A template has these placeholders:
//!
//! - `%t`: the element type.
//! - `%n`: the count.
//! - `%o`: a comma and the reduction, if there is one.
//! - `%r`: the root or tag.
//! - `%x`: the root or tag in hexadecimal.
//! - `%l`: the root or tag as the fingerprint of a list of lengths, unless it is 0.

/// Stands for "no reduction" in the bytes of a call.
const NO_REDUCTION: u8 = 0xFF;
/// Most items of a list that a reader uses.
const MAX_ITEMS: usize = 256;
/// Most characters of an item that a reader uses.
const MAX_ITEM_CHARS: usize = 64;

/// The names that the writer of one recording uses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Names {
    templates: Vec<String>,
    dtypes: Vec<String>,
    reductions: Vec<String>,
    algorithms: Vec<String>,
}

/// Encodes the names that a writer uses as one text, which its recording stores.
#[must_use]
pub fn encode(templates: &[&str], dtypes: &[&str], reductions: &[&str], algorithms: &[&str]) -> String {
    [templates, dtypes, reductions, algorithms].map(|list| list.join("\t")).join("\n")
}

/// Replaces the placeholders of a template. `root` is the root or tag of the call.
#[must_use]
pub fn fill_template(template: &str, dtype: &str, reduction: Option<&str>, root: u32, count: u64) -> String {
    let mut out = String::new();
    let mut chars = template.chars();
    while let Some(c) = chars.next() {
        match (c, if c == '%' { chars.next() } else { None }) {
            ('%', Some('t')) => out.push_str(dtype),
            ('%', Some('n')) => out.push_str(&count.to_string()),
            ('%', Some('r')) => out.push_str(&root.to_string()),
            ('%', Some('x')) => out.push_str(&format!("{root:08x}")),
            ('%', Some('l')) if root == 0 => {}
            ('%', Some('l')) => out.push_str(&format!(" in a list of lengths {root:08x}")),
            ('%', Some('o')) => out.extend(reduction.into_iter().flat_map(|name| [", ", name])),
            (c, next) => out.extend([c].into_iter().chain(next)),
        }
    }
    out
}

impl Names {
    /// Parses a text that [`encode`] has made. Missing names are allowed; readers see numbers instead.
    /// Control characters are replaced.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut lists = text.split('\n').map(|list| {
            let items = list.split('\t').take(MAX_ITEMS);
            let items = items.map(|item| item.replace(char::is_control, "\u{fffd}"));
            items.map(|item| item.chars().take(MAX_ITEM_CHARS).collect()).collect()
        });
        // A list that the text does not have is empty.
        let mut next = || lists.next().unwrap_or_default();
        Self { templates: next(), dtypes: next(), reductions: next(), algorithms: next() }
    }

    /// Describes the 16 bytes of a call as text, as in `all_reduce(f32, 1000, sum)`.
    #[must_use]
    pub fn call(&self, call: &[u8; 16]) -> String {
        let [operation, dtype, reduction, _, r0, r1, r2, r3, ..] = *call;
        let [.., c0, c1, c2, c3, c4, c5, c6, c7] = *call;
        let (root, count) =
            (u32::from_le_bytes([r0, r1, r2, r3]), u64::from_le_bytes([c0, c1, c2, c3, c4, c5, c6, c7]));
        let template = item(&self.templates, operation)
            .map_or_else(|| format!("operation {operation}(%t, %n%o)"), str::to_owned);
        let dtype = item(&self.dtypes, dtype).map_or_else(|| format!("type {dtype}"), str::to_owned);
        let reduction = (reduction != NO_REDUCTION).then(|| {
            item(&self.reductions, reduction).map_or_else(|| format!("reduction {reduction}"), str::to_owned)
        });
        fill_template(&template, &dtype, reduction.as_deref(), root, count)
    }

    /// Returns the name of the algorithm with this number, which counts from 1; `None` for 0.
    #[must_use]
    pub fn algorithm(&self, number: u8) -> Option<String> {
        let index = number.checked_sub(1)?;
        Some(item(&self.algorithms, index).map_or_else(|| format!("algorithm {index}"), str::to_owned))
    }
}

fn item(list: &[String], index: u8) -> Option<&str> {
    list.get(usize::from(index)).map(String::as_str).filter(|item| !item.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(operation: u8, dtype: u8, reduction: u8, root: u32, count: u64) -> [u8; 16] {
        let mut call = [0; 16];
        call[..3].copy_from_slice(&[operation, dtype, reduction]);
        call[4..8].copy_from_slice(&root.to_le_bytes());
        call[8..].copy_from_slice(&count.to_le_bytes());
        call
    }

    #[test]
    fn recorded_calls_print_as_in_errors() {
        let templates = ["barrier()", "sum(%t, %n%o, root %r)", "v(%x) 100%", "list(%n%l)"];
        let text = encode(&templates, &["f32"], &["max"], &["ring"]);
        let names = Names::parse(&text);
        assert_eq!(names.call(&call(0, 9, 0xFF, 0, 0)), "barrier()");
        assert_eq!(names.call(&call(1, 0, 0, 3, 1 << 40)), "sum(f32, 1099511627776, max, root 3)");
        assert_eq!(names.call(&call(1, 0, 0xFF, 3, 7)), "sum(f32, 7, root 3)");
        assert_eq!(names.call(&call(2, 0, 0, 0xABC, 7)), "v(00000abc) 100%");
        assert_eq!(names.call(&call(3, 0, 0, 0, 7)), "list(7)");
        assert_eq!(names.call(&call(3, 0, 0, 0xABC, 7)), "list(7 in a list of lengths 00000abc)");
        assert_eq!((names.algorithm(0), names.algorithm(1).as_deref()), (None, Some("ring")));
    }

    #[test]
    fn numbers_without_a_name_are_shown() {
        let names = Names::parse("");
        assert_eq!(names.call(&call(4, 5, 6, 7, 8)), "operation 4(type 5, 8, reduction 6)");
        assert_eq!(names.algorithm(3).as_deref(), Some("algorithm 2"));
    }

    #[test]
    fn untrusted_names_cannot_control_the_terminal_or_grow() {
        let names = Names::parse(&format!("\u{1b}[2J{}", "x".repeat(1000)));
        let shown = names.call(&call(0, 0, 0, 0, 0));
        assert!(shown.starts_with('\u{fffd}') && shown.chars().count() == MAX_ITEM_CHARS, "{shown}");
    }
}
