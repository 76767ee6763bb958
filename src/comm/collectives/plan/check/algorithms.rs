//! The check of every algorithm of the list, and of what the table chooses.

use super::*;
use crate::collectives::plan::{
    Algorithms, BLOCK_BYTES, Input, Rounding, all_gather, all_reduce, broadcast, reduce, reduce_scatter,
};

const ONCE: Rounding = Rounding::Once { wide_inputs: false };

/// The inputs of the plans of a collective, besides the ranks and the count.
struct Setting {
    tuning: Algorithms,
    rounding: Rounding,
    /// The size for which the table chooses.
    bytes: usize,
    /// Elements for each rank in a chunk.
    chunk: usize,
}

impl Setting {
    fn input<'a>(&self, rank: usize, topology: &'a Topology) -> Input<'a> {
        let Self { rounding, chunk, .. } = *self;
        Input { rank, topology, rounding, element_bytes: (BLOCK_BYTES / chunk).max(1) }
    }
}

/// Returns each override of `collective` with chunks of several lengths, and the table for few and many
/// bytes.
fn settings(collective: &str, roundings: &[Rounding]) -> Vec<Setting> {
    let choices = Algorithms::choices().filter(|(of, _)| *of == collective);
    let overrides = choices.map(|(of, name)| format!("{of}:{name}").parse().unwrap());
    let chunks = |tuning| {
        let chunks = [1, 4, usize::MAX].map(|chunk| (tuning, Rounding::Stepwise, 1, chunk));
        chunks.into_iter().chain([(tuning, ONCE, 1, 1)])
    };
    let table = [1, 1 << 30].map(|bytes| roundings.iter().map(move |&rounding| (rounding, bytes)));
    let table = table.into_iter().flatten().map(|(rounding, bytes)| (Algorithms::new(), rounding, bytes, 4));
    let all = overrides.flat_map(chunks).chain(table);
    all.map(|(tuning, rounding, bytes, chunk)| Setting { tuning, rounding, bytes, chunk })
        .filter(|setting| roundings.contains(&setting.rounding))
        .collect()
}

#[test]
fn every_all_reduce_adds_each_rank_once() {
    for at in settings("all_reduce", &[Rounding::Stepwise, ONCE]) {
        all_reduce_is_right(on_hosts, |rank, topology, count| {
            let algorithm = at.tuning.for_all_reduce(at.bytes, topology, at.rounding);
            all_reduce(algorithm, &at.input(rank, topology), count)
        });
    }
}

#[test]
fn every_broadcast_delivers_the_data_of_the_root() {
    for at in settings("broadcast", &[Rounding::Stepwise]) {
        broadcast_is_right(on_hosts, |rank, topology, count, root| {
            broadcast(at.tuning.for_broadcast(at.bytes), &at.input(rank, topology), count, root)
        });
    }
}

#[test]
fn every_reduce_adds_each_rank_once() {
    for at in settings("reduce", &[Rounding::Stepwise, ONCE]) {
        reduce_is_right(on_hosts, |rank, topology, count, root| {
            let algorithm = at.tuning.for_reduce(at.bytes, topology, at.rounding);
            reduce(algorithm, &at.input(rank, topology), count, root)
        });
    }
}

#[test]
fn every_all_gather_delivers_all_blocks() {
    for at in settings("all_gather", &[Rounding::Stepwise]) {
        all_gather_is_right(on_hosts, |rank, topology, blocks| {
            let algorithm = at.tuning.for_all_gather(at.bytes, topology);
            all_gather(algorithm, &at.input(rank, topology), blocks)
        });
    }
}

#[test]
fn every_reduce_scatter_adds_each_rank_once() {
    for at in settings("reduce_scatter", &[Rounding::Stepwise, ONCE]) {
        reduce_scatter_is_right(on_hosts, |rank, topology, blocks| {
            let algorithm = at.tuning.for_reduce_scatter(at.bytes, topology, at.rounding);
            reduce_scatter(algorithm, &at.input(rank, topology), blocks)
        });
    }
}
