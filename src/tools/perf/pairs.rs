//! Measures the bandwidth between each two hosts.

use std::time::Instant;

use convoke_comm::{CommError, Group, ReduceOp};
use serde_json::json;

use super::error::PerfError;
use super::round_robin;
use super::{memory, sizes, stats, table};

/// Approximate duration of the measurement of one direction, in microseconds.
const TARGET_MICROS: f64 = 100_000.0;
const MAX_MESSAGES: f64 = 256.0;
/// Maximum number of listed pairs; of more pairs only the slowest are listed.
const MAX_LISTED: usize = 28;

/// Measurement of one direction: microseconds of a message, and number of messages.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Direction {
    micros: f64,
    messages: f64,
}

/// Measurements between two hosts (lower, higher index): from the lower to the higher, and back.
#[derive(Debug, Clone, PartialEq)]
struct Pair {
    hosts: (usize, usize),
    directions: [Direction; 2],
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Pairs {
    hosts: usize,
    bytes: usize,
    pairs: Vec<Pair>,
}

/// Measures each pair of hosts with messages of `bytes`. Pairs without a common host run concurrently.
///
/// All ranks of `world` call it. The first rank of each host sends and receives. All ranks get equal results.
pub(crate) fn measure(
    world: &Group,
    bytes: usize,
    mut progress: impl FnMut(&str),
) -> Result<Pairs, PerfError> {
    let first: Vec<usize> = world.hosts().iter().filter_map(|ranks| ranks.first().copied()).collect();
    let own = first.iter().position(|&rank| rank == world.rank());
    let mut buffer =
        memory::try_filled_vec(if own.is_some() { bytes } else { 0 }, 0_u8, "messages between hosts")?;
    let rounds = round_robin::rounds(first.len());
    let mut pairs = Vec::new();
    for (number, round) in rounds.iter().enumerate() {
        progress(&format!("pairs of hosts: round {} of {}", number + 1, rounds.len()));
        world.barrier()?;
        for &(lower, higher) in round {
            let mut directions = [Direction::default(); 2];
            for (direction, (from, to)) in directions.iter_mut().zip([(lower, higher), (higher, lower)]) {
                *direction = match own {
                    Some(host) if host == from => send(world, first[to], &buffer)?,
                    Some(host) if host == to => receive(world, first[from], &mut buffer)?,
                    _ => Direction::default(),
                };
            }
            pairs.push(Pair { hosts: (lower, higher), directions });
        }
    }
    share_results(world, &mut pairs)?;
    Ok(Pairs { hosts: first.len(), bytes, pairs })
}

/// Sends messages to rank `to`, and measures the time until the receiver has confirmed them.
fn send(world: &Group, to: usize, buffer: &[u8]) -> Result<Direction, CommError> {
    // The first message opens the connection; the second gives an estimate of the time of a message.
    time_messages(world, to, buffer, 1)?;
    let micros = time_messages(world, to, buffer, 1)?;
    let messages = (TARGET_MICROS / micros).min(MAX_MESSAGES).floor();
    world.send(&[messages], to, 0)?;
    if messages < 2.0 {
        return Ok(Direction { micros, messages: 1.0 });
    }
    let micros = time_messages(world, to, buffer, messages as usize)? / messages;
    Ok(Direction { micros, messages })
}

fn time_messages(world: &Group, to: usize, buffer: &[u8], messages: usize) -> Result<f64, CommError> {
    let start = Instant::now();
    for _ in 0..messages {
        world.send(buffer, to, 0)?;
    }
    world.recv(&mut [0_u8], to, 0)?;
    Ok(start.elapsed().as_secs_f64() * 1e6)
}

/// Receives the messages that rank `from` sends by [`send`]. Only the sender measures times.
fn receive(world: &Group, from: usize, buffer: &mut [u8]) -> Result<Direction, CommError> {
    let mut received = |messages: usize| {
        (0..messages).try_for_each(|_| world.recv(&mut *buffer, from, 0).map(drop))?;
        world.send(&[0_u8], from, 0)
    };
    received(1)?;
    received(1)?;
    let mut messages = [0.0_f64];
    world.recv(&mut messages, from, 0)?;
    if messages[0] >= 2.0 {
        received(messages[0] as usize)?;
    }
    Ok(Direction::default())
}

/// Distributes the measurements of each rank to all ranks.
fn share_results(world: &Group, pairs: &mut [Pair]) -> Result<(), CommError> {
    let directions = pairs.iter().flat_map(|pair| pair.directions);
    let mut numbers: Vec<f64> =
        directions.flat_map(|direction| [direction.micros, direction.messages]).collect();
    world.all_reduce(&mut numbers, ReduceOp::Max)?;
    let shared = numbers.as_chunks::<2>().0.iter();
    let directions = pairs.iter_mut().flat_map(|pair| &mut pair.directions);
    directions
        .zip(shared)
        .for_each(|(direction, &[micros, messages])| *direction = Direction { micros, messages });
    Ok(())
}

impl Pairs {
    fn bandwidth(&self, direction: Direction) -> f64 {
        stats::gigabytes_per_second(self.bytes, direction.micros)
    }

    /// Returns the report on all pairs for people, as lines.
    pub(crate) fn text(&self, names: &[String]) -> Vec<String> {
        let name = |(lower, higher): (usize, usize)| format!("{} - {}", names[lower], names[higher]);
        let mut pairs: Vec<&Pair> = self.pairs.iter().collect();
        let rest = pairs.len().saturating_sub(MAX_LISTED);
        let both: Vec<_> = pairs.iter().map(|pair| (pair.hosts, self.slower(pair))).collect();
        if rest > 0 {
            pairs.sort_by(|a, b| self.slower(a).total_cmp(&self.slower(b)));
            pairs.truncate(MAX_LISTED);
        }
        pairs.sort_by_key(|pair| pair.hosts);
        let width =
            pairs.iter().map(|pair| name(pair.hosts).len()).max().unwrap_or_default().max("hosts".len());
        let mut lines = vec![
            format!("\npairs of hosts, messages of {}", sizes::text(self.bytes)),
            format!("{:>width$}{:>10}{:>10}", "hosts", "there", "back"),
            format!("{:>width$}{:>10}{:>10}", "", "GB/s", "GB/s"),
        ];
        for pair in pairs {
            let [there, back] = pair.directions.map(|direction| table::digits(self.bandwidth(direction)));
            lines.push(format!("{:>width$}{there:>10}{back:>10}", name(pair.hosts)));
        }
        if rest > 0 {
            lines.push(format!("{rest} faster pairs are not listed"));
        }
        let slow = round_robin::slowest_host(self.hosts, &both);
        let pair = round_robin::slowest_pair(&both, slow.as_ref().map(|slow| slow.item));
        if let Some(pair) = pair.filter(|_| self.hosts > 2) {
            let (hosts, speed, how) = (name(pair.item), pair.text(), pair.compare_with_median());
            lines.push(format!("# slowest pair of hosts: {hosts}, {speed}, {how}"));
        }
        if let Some(slow) = slow {
            let (host, speed, how) = (&names[slow.item], slow.text(), slow.compare_with_median());
            lines.push(format!("# slowest host: {host}, at most {speed} with any other, {how}"));
        }
        lines
    }

    fn slower(&self, pair: &Pair) -> f64 {
        let [there, back] = pair.directions.map(|direction| self.bandwidth(direction));
        there.min(back)
    }

    /// Returns the CSV lines of all pairs, one for each direction: `pair_h1_h2` is from h1 to h2.
    pub(crate) fn csv(&self, names: &[String], system: &str, transport: &str) -> Vec<String> {
        let line = |(from, to): (usize, usize), direction: Direction| {
            let (bandwidth, micros) = (self.bandwidth(direction), direction.micros);
            format!(
                "{system},{transport},pair_{}_{},2,u8,{},{},{micros:.4},{micros:.4},{bandwidth:.4},{bandwidth:.4}",
                names[from], names[to], self.bytes, direction.messages
            )
        };
        let both = |pair: &Pair| {
            let (lower, higher) = pair.hosts;
            [line((lower, higher), pair.directions[0]), line((higher, lower), pair.directions[1])]
        };
        self.pairs.iter().flat_map(both).collect()
    }

    pub(crate) fn json(&self, names: &[String]) -> Vec<String> {
        let one = |pair: &Pair| {
            let (lower, higher) = pair.hosts;
            let bandwidths = pair.directions.map(|direction| self.bandwidth(direction));
            json!({"hosts": [names[lower], names[higher]], "bytes": self.bytes, "gb_per_s": bandwidths})
                .to_string()
        };
        self.pairs.iter().map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds pairs from the bandwidth of their slower direction in GB/s.
    fn pairs(hosts: usize, bandwidths: &[((usize, usize), f64)]) -> Pairs {
        let direction = |bandwidth: f64| Direction { micros: 1000.0 / bandwidth, messages: 3.0 };
        let pair = |&(hosts, slower): &((usize, usize), f64)| Pair {
            hosts,
            directions: [direction(slower), direction(2.0 * slower)],
        };
        Pairs { hosts, bytes: 1_000_000, pairs: bandwidths.iter().map(pair).collect() }
    }

    fn names(hosts: usize) -> Vec<String> {
        (1..=hosts).map(|host| format!("h{host}")).collect()
    }

    #[test]
    fn pair_text_names_the_slowest_pair() {
        let text = pairs(3, &[((0, 1), 0.94), ((0, 2), 0.11), ((1, 2), 0.96)]).text(&names(3));
        assert!(text.contains(&"h1 - h3     0.110     0.220".to_owned()), "{text:?}");
        let last = text.last().unwrap();
        assert_eq!(
            last,
            "# slowest pair of hosts: h1 - h3, 0.11 GB/s, 9 times slower than the median (0.94)"
        );
        let slow_host = pairs(3, &[((0, 1), 0.1), ((0, 2), 1.0), ((1, 2), 0.1)]).text(&names(3));
        assert!(
            slow_host.last().unwrap().starts_with("# slowest host: h2, at most 0.10 GB/s"),
            "{slow_host:?}"
        );
        let two = pairs(2, &[((0, 1), 1.0)]).text(&names(2));
        assert!(two.last().unwrap().starts_with("h1 - h2"), "{two:?}");
    }

    #[test]
    fn only_the_slowest_of_many_pairs_are_listed() {
        let all: Vec<_> =
            round_robin::rounds(20).concat().into_iter().map(|(a, b)| ((a, b), (a + b) as f64)).collect();
        let text = pairs(20, &all).text(&names(20));
        assert!(text.iter().any(|line| line.contains("h1 - h2 ")), "{text:?}");
        assert!(text.contains(&format!("{} faster pairs are not listed", 190 - MAX_LISTED)), "{text:?}");
    }

    #[test]
    fn csv_and_json_contain_both_directions_of_a_pair() {
        let pairs = pairs(2, &[((0, 1), 1.0)]);
        let csv = pairs.csv(&names(2), "convoke", "tcp");
        assert_eq!(csv[0], "convoke,tcp,pair_h1_h2,2,u8,1000000,3,1000.0000,1000.0000,1.0000,1.0000");
        assert!(csv[1].starts_with("convoke,tcp,pair_h2_h1,") && csv[1].ends_with(",2.0000,2.0000"));
        let value: serde_json::Value = serde_json::from_str(&pairs.json(&names(2))[0]).unwrap();
        assert_eq!((value["hosts"][1].as_str(), value["gb_per_s"][1].as_f64()), (Some("h2"), Some(2.0)));
    }
}
