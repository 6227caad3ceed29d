//! The memory that this process may use: what the machine has available, within the limits of its
//! control groups.

use std::path::{Path, PathBuf};

/// Bytes that can still be taken; `None` where the system does not tell.
pub fn available() -> Option<usize> {
    available_in(Path::new("/"))
}

/// [`available`] with another root of the file system.
fn available_in(root: &Path) -> Option<usize> {
    let text = std::fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let limits = control_groups(root).into_iter().filter_map(|group| group.left());
    Some(limits.fold(kib << 10, usize::min))
}

/// One control group with the names of its files.
struct ControlGroup {
    folder: PathBuf,
    limit: &'static str,
    usage: &'static str,
    /// Field of `memory.stat` with the file pages that the kernel drops first.
    reclaimable: &'static str,
}

impl ControlGroup {
    /// Bytes below its limit, if it has one.
    fn left(&self) -> Option<usize> {
        let number = |file: &str| -> Option<usize> {
            std::fs::read_to_string(self.folder.join(file)).ok()?.trim().parse().ok()
        };
        // Version 2 writes `max` for no limit, version 1 a number near 2^63.
        let limit = number(self.limit).filter(|&limit| limit < 1 << 60)?;
        let stat = std::fs::read_to_string(self.folder.join("memory.stat")).unwrap_or_default();
        let reclaimable: usize = stat
            .lines()
            .find_map(|line| line.strip_prefix(self.reclaimable)?.strip_prefix(' ')?.trim().parse().ok())
            .unwrap_or(0);
        Some(limit.saturating_sub(number(self.usage).unwrap_or(0).saturating_sub(reclaimable)))
    }
}

/// The groups of this process and all groups above them. Inside of a container the path of
/// `/proc/self/cgroup` may not exist below the mount; the mount itself is then its group.
fn control_groups(root: &Path) -> Vec<ControlGroup> {
    let list = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut groups = Vec::new();
    for line in list.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (mount, limit, usage, reclaimable) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
            names if names.split(',').any(|name| name == "memory") => (
                "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            ),
            _ => continue,
        };
        let mount = root.join(mount);
        let own = mount.join(path.trim_start_matches('/'));
        for folder in own.ancestors().take_while(|folder| folder.starts_with(&mount)) {
            groups.push(ControlGroup { folder: folder.to_owned(), limit, usage, reclaimable });
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let meminfo = ("proc/meminfo", "MemTotal: 9999 kB\nMemAvailable:    8000 kB\n");
        for (name, text) in files.iter().chain([&meminfo]) {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn limits_of_control_groups_count_whichever_version_sets_them() {
        let kib = |files: &[(&str, &str)]| available_in(machine(files).path()).unwrap() >> 10;
        assert_eq!(kib(&[]), 8000);
        let own = ("proc/self/cgroup", "0::/a/b\n");
        let free = ("sys/fs/cgroup/a/b/memory.max", "max\n");
        assert_eq!(kib(&[own, free]), 8000);
        // A limit above binds as well; file pages that can be dropped do not count.
        let above = [
            ("sys/fs/cgroup/a/memory.max", "4194304\n"),
            ("sys/fs/cgroup/a/memory.current", "3145728\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 1048576\n"),
        ];
        assert_eq!(kib(&[&[own, free], &above[..]].concat()), 2048);
        // In a container the mount is the group.
        let mount = [("sys/fs/cgroup/memory.max", "1048576\n"), ("sys/fs/cgroup/memory.current", "0\n")];
        assert_eq!(kib(&[&[("proc/self/cgroup", "0::/not/mounted\n")], &mount[..]].concat()), 1024);
        let first = [
            ("proc/self/cgroup", "5:cpu:/x\n4:memory,hugetlb:/x\n0::/\n"),
            ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "2097152\n"),
            ("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "9000000\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        assert_eq!(kib(&first), 0, "more is used than allowed");
    }
}
