//! Reads once from sysfs which CPUs share a core, a cache, a socket or a NUMA node.

#[cfg(test)]
pub(super) mod fake_sysfs;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Highest number of a CPU or a NUMA node that is accepted.
const MAX_NUMBER: usize = 1 << 16;
/// Maximum number of bytes that are read of a file, far more than any list of CPUs needs.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// One CPU (a hardware thread) on which workers may run, and the parts of the machine to which it belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cpu {
    pub(super) id: usize,
    /// Number of its NUMA node.
    pub(super) node: usize,
    /// Number of its socket.
    pub(super) package: usize,
    /// Lowest CPU that shares the last-level cache, which identifies the cache.
    pub(super) cache: usize,
    /// Lowest hyperthread of the physical core, which identifies the core.
    pub(super) core: usize,
}

/// The CPUs on which workers may run, in order of their numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Topology {
    pub(super) cpus: Vec<Cpu>,
}

/// The reasons why the CPU topology cannot be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum TopologyError {
    #[error("{} holds `{text}`, which is no {wanted}", path.display())]
    Malformed { path: PathBuf, text: String, wanted: &'static str },
    #[error("{} cannot be read: {source}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("the CPUs that workers may run on are not known")]
    NoCpus,
}

impl Topology {
    /// Reads sysfs below `root` for those of the `allowed` CPUs (ascending) that are online.
    ///
    /// If the kernel does not report something, a simple machine is assumed: one NUMA node, one socket, one
    /// core for each CPU, and one cache for each socket.
    pub(super) fn read(root: &Path, allowed: &[usize]) -> Result<Self, TopologyError> {
        let system = root.join("sys/devices/system");
        let online = list(&system.join("cpu/online"))?;
        let is_online = |cpu: &usize| online.as_ref().is_none_or(|online| online.binary_search(cpu).is_ok());
        let nodes = nodes(&system.join("node"))?;
        let mut known = TopologyCache::default();
        let mut cpus = Vec::new();
        for id in allowed.iter().copied().filter(is_online) {
            let dir = system.join(format!("cpu/cpu{id}"));
            let node = nodes.get(&id).copied().unwrap_or(0);
            let (core, package) = known.core(id, node, &dir.join("topology"))?;
            let cache = known.cache(id, package, &dir.join("cache"))?;
            cpus.push(Cpu { id, node, package, cache, core });
        }
        if cpus.is_empty() { Err(TopologyError::NoCpus) } else { Ok(Self { cpus }) }
    }
}

/// Groups the CPUs with equal keys. Returns the groups in order of their keys.
pub(super) fn groups<'a, K: Ord>(
    cpus: impl IntoIterator<Item = &'a Cpu>,
    key: impl Fn(&Cpu) -> K,
) -> Vec<Vec<usize>> {
    let mut groups: BTreeMap<K, Vec<usize>> = BTreeMap::new();
    for cpu in cpus {
        groups.entry(key(cpu)).or_default().push(cpu.id);
    }
    groups.into_values().collect()
}

/// What sysfs files already read say about other CPUs. Without this, reading a large machine is slow.
#[derive(Debug, Default)]
struct TopologyCache {
    /// Core and socket by CPU.
    cores: HashMap<usize, (usize, usize)>,
    /// First CPU for each socket, node and core_id, used if the kernel does not list hyperthreads.
    by_core_id: HashMap<(usize, usize, usize), usize>,
    /// Cache by CPU, as the lowest CPU that shares it.
    caches: HashMap<usize, usize>,
    /// First CPU of each socket.
    packages: HashMap<usize, usize>,
}

impl TopologyCache {
    fn core(&mut self, id: usize, node: usize, dir: &Path) -> Result<(usize, usize), TopologyError> {
        if let Some(&found) = self.cores.get(&id) {
            return Ok(found);
        }
        let package = number(&dir.join("physical_package_id"))?.unwrap_or(0);
        let siblings = list(&dir.join("thread_siblings_list"))?.unwrap_or_default();
        let core = match siblings.first() {
            Some(&lowest) => lowest,
            None => number(&dir.join("core_id"))?
                .map_or(id, |core_id| *self.by_core_id.entry((package, node, core_id)).or_insert(id)),
        };
        self.cores.extend(siblings.into_iter().map(|sibling| (sibling, (core, package))));
        Ok((core, package))
    }

    fn cache(&mut self, id: usize, package: usize, dir: &Path) -> Result<usize, TopologyError> {
        if let Some(&found) = self.caches.get(&id) {
            return Ok(found);
        }
        let first_of_package = *self.packages.entry(package).or_insert(id);
        let sharers = last_level_cache(dir)?.unwrap_or_default();
        let cache = sharers.first().copied().unwrap_or(first_of_package);
        self.caches.extend(sharers.into_iter().map(|sharer| (sharer, cache)));
        Ok(cache)
    }
}

/// Returns the CPUs that share the highest-level cache that holds data; `None` if the kernel reports none.
fn last_level_cache(dir: &Path) -> Result<Option<Vec<usize>>, TopologyError> {
    let mut last: Option<(usize, PathBuf)> = None;
    for (_, index) in numbered_entries(dir, "index") {
        let is_code = text(&index.join("type"))?.is_some_and(|kind| kind == "Instruction");
        let Some(level) = number(&index.join("level"))?.filter(|_| !is_code) else { continue };
        if last.as_ref().is_none_or(|(highest, _)| level > *highest) {
            last = Some((level, index));
        }
    }
    last.map_or(Ok(None), |(_, index)| list(&index.join("shared_cpu_list")))
}

/// Returns the NUMA node of each CPU.
fn nodes(dir: &Path) -> Result<HashMap<usize, usize>, TopologyError> {
    let mut nodes = HashMap::new();
    for (node, dir) in numbered_entries(dir, "node") {
        let cpus = list(&dir.join("cpulist"))?.unwrap_or_default();
        nodes.extend(cpus.into_iter().map(|cpu| (cpu, node)));
    }
    Ok(nodes)
}

/// Returns the entries of a folder that are named `prefix` plus a number, sorted by number. Returns none if
/// there is no such folder.
pub(super) fn numbered_entries(dir: &Path, prefix: &str) -> Vec<(usize, PathBuf)> {
    let number = |name: OsString| decimal(name.to_str()?.strip_prefix(prefix)?);
    let mut found: Vec<_> = std::fs::read_dir(dir).map_or(Vec::new(), |entries| {
        entries.flatten().filter_map(|entry| Some((number(entry.file_name())?, entry.path()))).collect()
    });
    found.sort_unstable();
    found
}

/// Returns a file's text without blanks around it; `None` if there is no such file.
pub(super) fn text(path: &Path) -> Result<Option<String>, TopologyError> {
    let mut bytes = Vec::new();
    match File::open(path).and_then(|file| file.take(MAX_FILE_BYTES).read_to_end(&mut bytes)) {
        Ok(_) => Ok(Some(String::from_utf8_lossy(&bytes).trim().to_owned())),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(source) => Err(TopologyError::Unreadable { path: path.to_owned(), source }),
    }
}

/// Reads a file with one number; `None` if there is no such file. The value -1, which means unknown, becomes
/// 0.
pub(super) fn number(path: &Path) -> Result<Option<usize>, TopologyError> {
    let parse = |text: &str| if text == "-1" { Some(0) } else { text.parse().ok() };
    parsed(path, "number", parse)
}

fn list(path: &Path) -> Result<Option<Vec<usize>>, TopologyError> {
    parsed(path, "list of CPUs", cpu_list)
}

fn parsed<T>(
    path: &Path,
    wanted: &'static str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>, TopologyError> {
    let Some(text) = text(path)? else { return Ok(None) };
    parse(&text).map(Some).ok_or_else(|| {
        let text = text.chars().take(60).flat_map(char::escape_debug).collect();
        TopologyError::Malformed { path: path.to_owned(), text, wanted }
    })
}

/// Parses a list of CPUs such as `0-3,8`. Returns `None` unless it is ascending, as the kernel writes it.
/// This bounds the result by the highest accepted CPU number.
fn cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    if text.is_empty() {
        return Some(cpus);
    }
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (decimal(first)?, decimal(last)?);
        if first > last || cpus.last().is_some_and(|before| *before >= first) {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// Parses decimal digits, without the sign that `parse` accepts; `None` above the highest accepted number.
fn decimal(text: &str) -> Option<usize> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|number| digits && *number <= MAX_NUMBER)
}
