//! Which ranks each node gets, and how torchrun's agents write that down. Pure.

use serde::{Deserialize, Serialize};

/// What a node says of itself, under `torchelastic/role_info/<node>`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RoleInfo {
    pub(crate) role: String,
    /// Rank of the node.
    pub(crate) rank: usize,
    pub(crate) local_world_size: usize,
}

/// What node 0 answers, under `torchelastic/assigned_ranks/<node>`:
/// base rank, world size, base role rank, role world size.
pub(crate) type Ranks = (usize, usize, usize, usize);

/// The ranks of all nodes: nodes in order, each with as many consecutive ranks as it has workers.
pub(crate) fn assign(nodes: &[RoleInfo]) -> Vec<Ranks> {
    let world_size = nodes.iter().map(|node| node.local_world_size).sum();
    let mut base_rank = 0;
    let mut role_sizes = std::collections::HashMap::<&str, usize>::new();
    let bases: Vec<_> = nodes
        .iter()
        .map(|node| {
            let role_size = role_sizes.entry(&node.role).or_default();
            let bases = (base_rank, *role_size);
            base_rank += node.local_world_size;
            *role_size += node.local_world_size;
            bases
        })
        .collect();
    nodes
        .iter()
        .zip(bases)
        .map(|(node, (base, role_base))| (base, world_size, role_base, role_sizes[node.role.as_str()]))
        .collect()
}

/// JSON as Python writes it, with a space after `,` and `:`.
pub(crate) fn encode(value: &impl Serialize) -> String {
    struct Python;
    impl serde_json::ser::Formatter for Python {
        fn begin_array_value<W: ?Sized + std::io::Write>(
            &mut self,
            out: &mut W,
            first: bool,
        ) -> std::io::Result<()> {
            out.write_all(if first { b"" } else { b", " })
        }
        fn begin_object_key<W: ?Sized + std::io::Write>(
            &mut self,
            out: &mut W,
            first: bool,
        ) -> std::io::Result<()> {
            out.write_all(if first { b"" } else { b", " })
        }
        fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
            out.write_all(b": ")
        }
    }
    let mut out = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut out, Python);
    // Plain data into memory: neither the values nor the writer can fail.
    let _ = value.serialize(&mut serializer);
    String::from_utf8(out).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(role: &str, rank: usize, local_world_size: usize) -> RoleInfo {
        RoleInfo { role: role.to_owned(), rank, local_world_size }
    }

    #[test]
    fn ranks_are_cumulative_in_node_order_and_within_roles() {
        let nodes = [node("x", 0, 2), node("y", 1, 1), node("x", 2, 3)];
        assert_eq!(assign(&nodes), [(0, 6, 0, 5), (2, 6, 0, 1), (3, 6, 2, 5)]);
    }

    #[test]
    fn the_texts_are_those_of_python() {
        assert_eq!(encode(&node("a\"b", 1, 2)), r#"{"role": "a\"b", "rank": 1, "local_world_size": 2}"#);
        assert_eq!(encode(&assign(&[node("x", 0, 1)])[0]), "[0, 1, 0, 1]");
    }
}
